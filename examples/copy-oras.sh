#!/bin/sh
# Copies released images with all their attachments to the registry of a closed network, with oras.
#
# Edit:   `image`, `tags`, `inside`.
# Run:    sh copy-oras.sh pack      with internet: writes images.tar
#         sh copy-oras.sh unpack    in the closed network, beside images.tar
# Before: oras login, for both registries.
set -eu
image=registry.example.com/org/pt-cuda
tags="2.9 2.9-jupyter"
inside=registry.internal/org/pt-cuda

case "${1:-}" in
pack)
    oras repo tags "$image" >all-tags
    for tag in $tags; do
        # With -r alone, oras 1.2 leaves out an index of several architectures.
        oras copy --to-oci-layout "$image:$tag" "images:$tag"
        oras copy -r --to-oci-layout "$image:$tag" "images:$tag"
        {
            oras resolve "$image:$tag"
            oras manifest fetch "$image:$tag" | jq -r '.manifests[]?.digest'
        } | cut -d: -f2 >digests
        # Signatures and lists of attachments whose tags contain the digest.
        grep -F -f digests all-tags | while read -r name; do
            oras copy --to-oci-layout "$image:$name" "images:$name"
        done
    done
    tar -cf images.tar images
    ;;
unpack)
    tar -xf images.tar
    jq -r '.manifests[].annotations["org.opencontainers.image.ref.name"] // empty' images/index.json |
        while read -r tag; do
            oras copy --from-oci-layout "images:$tag" "$inside:$tag"
            oras copy -r --from-oci-layout "images:$tag" "$inside:$tag"
        done
    ;;
*)
    echo "usage: sh copy-oras.sh pack | unpack" >&2
    exit 2
    ;;
esac
