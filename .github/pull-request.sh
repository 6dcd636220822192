#!/bin/sh
# Opens a pull request with the changed files, or updates the one that is open. The summary of the run has the text of
# the pull request, even if nothing changed. If the text has a line `To do:`, a pull request without changes is opened: a
# person must do something that no program can.
# Usage: pull-request.sh BRANCH TITLE FILE-WITH-THE-CHANGES
set -eu
branch=updates/$1 title=$2 changes=$3
{
    printf 'Result of the update:\n\n```\n'
    # Without progress: the commit names the files.
    sed -E '/^[a-z0-9.-]+: (resolving|getting) |^Debian .*: reading |^written: |^[0-9]+ files, /d' "$changes" |
        head -c 60000
    printf '```\n'
    # The push below overwrites what others pushed to this branch.
    printf '\nWork on a branch of your own: each update overwrites %s.\n' "$branch"
} >"$changes.md"
cat "$changes.md" >>"$GITHUB_STEP_SUMMARY"
git add --all
if git diff --cached --quiet && ! grep -q '^To do: ' "$changes"; then
    echo "nothing changed"
    exit
fi
git config user.name "github-actions[bot]"
git config user.email "41898282+github-actions[bot]@users.noreply.github.com"
gh auth setup-git
git switch --create "$branch"
git commit --quiet --allow-empty --message "$title"
git push --quiet --force origin "$branch"
# A pull request of a fork may have a branch of the same name.
open=$(gh pr list --head "$branch" --state open --json number,isCrossRepository \
    --jq '.[] | "\(.isCrossRepository) \(.number)"')
number=$(printf '%s\n' "$open" | sed -n 's/^false //p' | head -n 1)
if [ -z "$number" ]; then
    gh pr create --head "$branch" --title "$title" --body-file "$changes.md"
else
    gh pr edit "$number" --body-file "$changes.md"
fi
