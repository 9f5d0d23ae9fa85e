"""Custom operators (domain `kimi`): one file an op, each with its torch reference, shape rule and
body.

A graph holds an op as one node, and its ONNX body as a function of the model, so plain ONNX Runtime
runs it and a TensorRT plugin of the same name may take its place. No op shares its name with a
standard one: TensorRT's parser picks an importer by the name alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DOMAIN = "kimi"
OPSET = 24
MASKED = -1e30  # stands for −inf in masks: finite in bf16 and fp32, so no NaN can come of it

Output = tuple[tuple[Any, ...], "torch.dtype"]


@dataclass(frozen=True)
class CustomOp:
    """One operator. Calling it computes its reference, or, under torch.export, leaves its node.

    `outputs` maps inputs and attributes to the shape and dtype of each output; `body` maps the
    number of inputs, of which the last may be optional, and the attributes to the ONNX text of the
    operator's function.
    """

    name: str
    reference: Callable[..., Any]
    outputs: Callable[..., list[Output]]
    body: Callable[..., str]

    def __call__(self, *inputs: "torch.Tensor", **attributes: Any) -> Any:
        import torch

        if not torch.compiler.is_exporting():
            return self.reference(*inputs, **attributes)
        outputs = self.outputs(*inputs, **attributes)
        nodes = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{self.name}",
            inputs,
            attributes,
            dtypes=[dtype for _, dtype in outputs],
            shapes=[shape for shape, _ in outputs],
            version=1,
        )
        return nodes if len(nodes) > 1 else nodes[0]


def function_text(name: str, inputs: str, outputs: str, body: str, attributes: str = "") -> str:
    """An ONNX function in the text form that `onnx.parser.parse_function` reads."""
    declared = f"<{attributes}>" if attributes else ""
    head = f'<opset_import: ["": {OPSET}], domain: "{DOMAIN}">'
    return f"{head} {name} {declared}({inputs}) => ({outputs}) {{ {body} }}"
