# fedcache in a container; the home, with stores and runs, is the volume /data.
#
#   docker build -t fedcache .                                   # for the CPU
#   docker build -t fedcache:cuda --build-arg TORCH=cuda .       # for NVIDIA GPUs: gigabytes more
#   docker run --rm -v fedcache:/data fedcache demo
#   docker run --rm -v fedcache:/data -v "$PWD/photos:/photos:ro" --gpus all fedcache:cuda extract --dataset folder:/photos --backbones glyph-clip
#
# Versions are those of uv.lock; of PyTorch the CPU build of the same version.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=cpu
ARG EXTRAS=demo,plots,tables,h5
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
# hadolint ignore=DL3013
RUN pip install --no-cache-dir uv
WORKDIR /src
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY fedcache fedcache
# PyPI's PyTorch for Linux is the one with CUDA.
RUN case "$TORCH" in cpu) export UV_TORCH_BACKEND=cpu ;; cuda) ;; *) echo "TORCH is cpu or cuda" >&2; exit 2 ;; esac \
    && uv export --quiet --frozen --no-hashes --no-emit-project --all-extras --output-file /tmp/versions.txt \
    && uv venv /opt/fedcache \
    && uv pip install --no-cache --python /opt/fedcache/bin/python --constraint /tmp/versions.txt ".[$EXTRAS]"

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/fedcache /opt/fedcache
RUN useradd --create-home --uid 1000 fedcache && install -d -o fedcache -g fedcache -m 700 /data
ENV PATH=/opt/fedcache/bin:$PATH FEDCACHE_HOME=/data
USER 1000
WORKDIR /data
VOLUME /data
ENTRYPOINT ["fedcache"]
CMD ["--help"]
