# offrl with torch for CPUs:   docker build -t offrl .
# for NVIDIA GPUs:             docker build -t offrl-cuda --build-arg TORCH=cu126 .
# then:                        docker run --rm -v "$PWD/runs:/work/runs" offrl train      (GPUs: --gpus all)
FROM python:3.11-slim

# A folder of https://download.pytorch.org/whl: cpu, cu126, cu128, ...
ARG TORCH=cpu
# EGL and OSMesa draw films without a screen; a compiler makes compiled training steps on CPUs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libegl1 libgl1 libosmesa6 \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/${TORCH}

WORKDIR /offrl
COPY . .
RUN pip install --no-cache-dir ".[video,export,parquet]"

RUN useradd --create-home offrl && mkdir -p /work/runs && chown -R offrl /work
USER offrl
WORKDIR /work
ENTRYPOINT ["offrl"]
CMD ["--help"]
