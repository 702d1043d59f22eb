# syntax=docker/dockerfile:1.7
# Builds the two services, one image each. Both images have the gateway too (python -m gateway_svc).
#
#   docker build --target encoder --tag lookonce-encoder:0.1.0 .
#   docker build --target decoder --tag lookonce-decoder:0.1.0 .
#
# COMPUTE is a folder of PyTorch's own index: cpu, or a CUDA build such as cu130. A CUDA build includes CUDA's libraries
# and needs only the driver on the host. The images contain no model: mount one at /model. They run as uid 10001 with a
# read-only root and write only to /tmp. For a package mirror, pass pip's configuration with
# `--secret id=pip,src=pip.conf`; nothing of it stays in an image.

# The Python version that the tests use.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG COMPUTE=cpu
# Address of a mirror of PyTorch's index. If set, COMPUTE has no effect.
ARG TORCH_INDEX_URL=
# The extra heic is not among them because of its licence (docs/operations/deploying.md).
ARG EXTRAS=serve,gateway,otel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_PROGRESS_BAR=off
WORKDIR /src
RUN python -m venv /opt/lookonce
ENV PATH=/opt/lookonce/bin:${PATH}
# torch is installed first, with the torchvision that goes with it. It is large and rarely changes, and no later step then
# fetches another build of it. Services import torchvision for models that need it alone.
COPY constraints/cpu.txt constraints/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --index-url "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/${COMPUTE}}" \
        "$(grep '^torch==' constraints/cpu.txt)" "$(grep '^torchvision==' constraints/cpu.txt)"
# The wheel's build generates the gRPC stubs from protos/.
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY protos protos
COPY lookonce lookonce
COPY encoder_svc encoder_svc
COPY decoder_svc decoder_svc
COPY gateway_svc gateway_svc
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --constraint constraints/cpu.txt ".[${EXTRAS}]"

FROM ${PYTHON_IMAGE} AS service
# The compiler is needed at run time: the services ask it whether a compiled library fits this processor and these
# sources, and Triton uses it. It has no pinned version, because Debian's archive keeps only the latest one of a
# release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 lookonce \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lookonce \
    && install --directory --owner 10001 --group 10001 --mode 0755 /var/cache/lookonce
COPY --from=build /opt/lookonce /opt/lookonce
COPY k8s/image/check_health.py k8s/image/compile_kernels.py /opt/lookonce/share/
# The compiled libraries are in the image. All other caches are in /tmp, which is writable.
ENV PATH=/opt/lookonce/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    XDG_CACHE_HOME=/var/cache/lookonce \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    HF_HUB_OFFLINE=1 \
    LOOKONCE_MODEL=/model \
    LOOKONCE_LISTEN=0.0.0.0:50051 \
    LOOKONCE_METRICS_LISTEN=0.0.0.0:9100
WORKDIR /tmp
USER 10001:10001
RUN python /opt/lookonce/share/compile_kernels.py
EXPOSE 50051 9100
STOPSIGNAL SIGTERM
LABEL org.opencontainers.image.title="Lookonce" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"

FROM service AS encoder
LABEL org.opencontainers.image.description="Lookonce's encoder: images to embedding rows in the shared cache"
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
    CMD ["python", "/opt/lookonce/share/check_health.py", "lookonce.encoder.v1.EncoderService"]
ENTRYPOINT ["python", "-m", "encoder_svc"]

FROM service AS decoder
LABEL org.opencontainers.image.description="Lookonce's decoder: prompts and cached image embeddings to tokens"
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
    CMD ["python", "/opt/lookonce/share/check_health.py", "lookonce.decoder.v1.DecoderService"]
ENTRYPOINT ["python", "-m", "decoder_svc"]
