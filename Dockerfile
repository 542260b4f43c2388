# The service. CPU: docker build -t radical-rerank .
# GPU: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 -t radical-rerank:gpu .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/models RADICAL_CACHE=/models/radical

RUN useradd --create-home --uid 1000 ranker && mkdir /models && chown ranker /models
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt torch \
 && pip install -c constraints.txt '.[serve]'

USER ranker
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
  CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz')"
# SIGTERM lets running requests end: give it as long as RADICAL_SERVE_DEADLINE before a kill.
ENTRYPOINT ["radical", "serve", "--host", "0.0.0.0"]
