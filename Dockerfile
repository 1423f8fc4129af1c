# syntax is plain: it builds with any Docker, with or without BuildKit.
#   docker build -t tandem .                                             CPU
#   docker build -t tandem:cuda --build-arg TORCH_INDEX=default .        NVIDIA (torch's CUDA build, gigabytes)
FROM python:3.11-slim-bookworm AS build

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=auto
ARG MODEL=smollm2-135m-instruct

RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TANDEM_CACHE_DIR=/var/cache/tandem

WORKDIR /src
# torch first: it changes rarely and takes longest.
COPY deploy/setup/install_torch.py deploy/setup/
RUN python deploy/setup/install_torch.py "$TORCH" --index "$TORCH_INDEX"
COPY pyproject.toml ./
# Then what else is needed, so that a change of the sources installs nothing anew.
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['traces'], sep='\n')" \
    > requirements.txt && pip install -c /opt/tandem/.stamps/constraints.txt -r requirements.txt
COPY setup.py README.md LICENSE NOTICE ./
COPY protos protos
COPY tandem tandem
COPY kernels kernels
COPY engine_service engine_service
COPY draft_service draft_service
COPY router router
COPY gateway gateway
RUN pip install --no-deps . \
    # From elsewhere, so that the installed package is the one that is built.
    && cd / && python -c "from kernels.cpu.build import main; raise SystemExit(main())"
# Images keep times in whole seconds, and caches know a file by its time: so it gets a whole one before they are made.
RUN cd / && tandem models pull "$MODEL" \
    && find "$TANDEM_CACHE_DIR" -type f -name "*.json" -not -path "*/models/*" -delete \
    && find "$TANDEM_CACHE_DIR/models" -type f -exec touch -d "2026-01-01 00:00:00 UTC" {} + \
    && python -c "import sys; from tandem.models.store import resolve; from tandem.tokenizer import load_bundle; \
load_bundle(resolve(sys.argv[1]).path)" "$MODEL"

FROM python:3.11-slim-bookworm

RUN useradd --system --uid 10001 --user-group --home-dir /var/cache/tandem --no-create-home tandem \
    # Fresh volumes take the owner of the folder that they are mounted on.
    && install -d -o tandem -g tandem -m 0700 /run/tandem /var/cache/tandem
COPY --from=build /opt/tandem /opt/tandem
COPY --from=build --chown=tandem:tandem /var/cache/tandem /var/cache/tandem
COPY LICENSE NOTICE /usr/share/doc/tandem/
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 TANDEM_CACHE_DIR=/var/cache/tandem HOME=/var/cache/tandem

USER tandem
WORKDIR /var/cache/tandem
STOPSIGNAL SIGTERM
ENTRYPOINT ["tandem"]
# The whole stack in one container. In docker-compose.yml each service has its own.
CMD ["serve", "--host", "0.0.0.0"]
