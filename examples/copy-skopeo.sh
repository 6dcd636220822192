#!/bin/sh
# Copies released images to the registry of a closed network, with skopeo. It copies only what has a tag, so use it for
# registries without the referrers API, such as docker-registry 2.8 and ghcr.io, where all attachments have tags.
#
# Edit:   `image`, `tags`, `inside`.
# Run:    sh copy-skopeo.sh pack      with internet: writes images.tar
#         sh copy-skopeo.sh unpack    in the closed network, beside images.tar
# Before: skopeo login, for both registries.
set -eu
image=registry.example.com/org/pt-cuda
tags="2.9 2.9-jupyter"
inside=registry.internal/org/pt-cuda

case "${1:-}" in
pack)
    skopeo list-tags "docker://$image" | jq -r '.Tags[]' >tags
    for tag in $tags; do
        skopeo inspect --raw "docker://$image:$tag" >manifest
        {
            sha256sum <manifest | cut -c1-64
            jq -r '.manifests[]?.digest | ltrimstr("sha256:")' manifest
        } >digests
        for name in "$tag" $(grep -F -f digests tags); do
            skopeo copy --all "docker://$image:$name" "oci:images:$name"
        done
    done
    tar -cf images.tar images
    ;;
unpack)
    tar -xf images.tar
    jq -r '.manifests[].annotations["org.opencontainers.image.ref.name"]' images/index.json |
        while read -r tag; do
            skopeo copy --all "oci:images:$tag" "docker://$inside:$tag"
        done
    ;;
*)
    echo "usage: sh copy-skopeo.sh pack | unpack" >&2
    exit 2
    ;;
esac
