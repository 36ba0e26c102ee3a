"""torch-kda: Kimi Delta Attention language models in PyTorch, one forward per prompt.

`LLM` and `SamplingParams` are the front door; they are resolved on first use, so that
`import torch_kda` stays light.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from .kda.llm import LLM
    from .scheduler.request import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from .kda.llm import LLM

        return LLM
    if name == "SamplingParams":
        from .scheduler.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
