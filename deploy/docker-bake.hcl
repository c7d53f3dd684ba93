# docker buildx bake -f deploy/docker-bake.hcl            light, judge and cpu
# docker buildx bake -f deploy/docker-bake.hcl gpu
# docker buildx bake -f deploy/docker-bake.hcl torch      trainer, value-estimation and tinker without an engine
# REGISTRY=registry.example.org/spo/ VERSION=0.1.0 docker buildx bake -f deploy/docker-bake.hcl --push
# Into this machine's Docker, which holds one platform and no attestations:
#   docker buildx bake -f deploy/docker-bake.hcl --load --set '*.platform=linux/amd64' --set '*.attest='

variable "REGISTRY" { default = "" }
variable "VERSION" { default = "0.1.0" }
variable "REVISION" { default = "unknown" }
variable "BASE_IMAGE" { default = "python:3.11-slim-bookworm" }
variable "GPU_BASE_IMAGE" { default = "python:3.12-slim-bookworm" }
variable "JUDGE_PACKAGES" { default = "" }
variable "PIP_EXTRA_INDEX_URL" { default = "https://download.pytorch.org/whl/cpu" }

# Of light and judge; wheels of the engines are for x86-64, and the CPU engine's for arm64 too (then compiled in part).
variable "PLATFORMS" { default = "linux/amd64,linux/arm64" }
variable "ENGINE_PLATFORMS" { default = "linux/amd64" }

group "default" { targets = ["light", "judge", "cpu"] }

target "family" {
  context = "."
  # What is in the image, and what it was made from: attached to the image in the registry (not with --load).
  attest = ["type=sbom", "type=provenance,mode=max"]
  args = {
    BASE_IMAGE = BASE_IMAGE
    VERSION    = VERSION
    REVISION   = REVISION
  }
}

target "light" {
  inherits   = ["family"]
  platforms  = split(",", PLATFORMS)
  dockerfile = "deploy/Dockerfile.light"
  target     = "light"
  tags       = ["${REGISTRY}spo-light:${VERSION}"]
}

target "judge" {
  inherits   = ["family"]
  platforms  = split(",", PLATFORMS)
  dockerfile = "deploy/Dockerfile.light"
  target     = "judge"
  args       = { JUDGE_PACKAGES = JUDGE_PACKAGES }
  tags       = ["${REGISTRY}spo-judge:${VERSION}"]
}

target "cpu" {
  inherits   = ["family"]
  platforms  = split(",", ENGINE_PLATFORMS)
  dockerfile = "deploy/Dockerfile.cpu"
  args       = { PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL }
  tags       = ["${REGISTRY}spo-cpu:${VERSION}"]
}

target "torch" {
  inherits   = ["family"]
  platforms  = split(",", ENGINE_PLATFORMS)
  dockerfile = "deploy/Dockerfile.torch"
  args       = { PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL }
  tags       = ["${REGISTRY}spo-torch:${VERSION}"]
}

target "gpu" {
  inherits   = ["family"]
  platforms  = split(",", ENGINE_PLATFORMS)
  dockerfile = "deploy/Dockerfile.gpu"
  args       = { BASE_IMAGE = GPU_BASE_IMAGE }
  tags       = ["${REGISTRY}spo-gpu:${VERSION}"]
}
