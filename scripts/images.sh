#!/usr/bin/env bash
# Build the images, push them, and write a values file that names them by digest:
#   REGISTRY=registry.example.org/spo/ ENGINE=cpu VERSION=0.1.0 scripts/images.sh
# Needs Docker with buildx, and a login at the registry.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${REGISTRY:?REGISTRY=registry.example.org/spo/ is needed}"
export REGISTRY=${REGISTRY%/}/
engine=${ENGINE:-cpu}
export VERSION=${VERSION:-0.1.0}
export REVISION=${REVISION:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
mkdir -p build
docker buildx bake -f deploy/docker-bake.hcl --push --metadata-file build/images.json light judge "$engine"
python3 scripts/image_values.py build/images.json "$REGISTRY" "$VERSION" "$engine" >build/values-images.yaml
echo "helm install ... -f build/values-images.yaml"
