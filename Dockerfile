# An image for the manifests that `chameleon kubernetes` writes; see docs/kubernetes.md.
# Build: docker build --tag registry.example/chameleon .
FROM python:3.12-slim

# Compilers are not needed: every dependency has wheels. openssl is for control.tls = "generate".
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssl \
    && rm --recursive --force /var/lib/apt/lists/*

WORKDIR /opt/chameleon
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m pip install --no-cache-dir --constraint constraints.txt hatchling editables \
    && python -m pip install --no-cache-dir --no-build-isolation --constraint constraints.txt '.[page]'

# Kernels are compiled here, and not by each pod, if the nodes have the kind of processor that builds the image.
RUN python -c "from chameleon_ft.recovery import warm_up; warm_up()"

WORKDIR /
