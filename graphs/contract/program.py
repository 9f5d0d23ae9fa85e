"""What an engine runs in one mode, as read from the compiled engine (graphs/engines/program.py)."""

from dataclasses import dataclass

FP8 = "fp8_e4m3"
FP8_PRODUCT = (FP8, FP8, "float")


@dataclass(frozen=True)
class Product:
    """A matrix product: its linear layers or, where it has none, its nodes.

    types: of activation, weight and result, as TensorRT names them. `in_place`: the weight is read
    where it is bound.
    """

    layers: tuple[str, ...]
    types: tuple[str, str, str]
    in_place: bool

    @property
    def is_fp8(self) -> bool:
        return self.types == FP8_PRODUCT


@dataclass(frozen=True)
class Program:
    """launches: of each kind; `fp8_layers`: the linear layers with FP8 weights, by name."""

    launches: dict[str, int]
    products: tuple[Product, ...]
    fp8_layers: tuple[str, ...]
    streams: int
    events: int
    tf32: bool

    @property
    def launch_count(self) -> int:
        return sum(self.launches.values())

    def faults(self) -> list[str]:
        """What an engine must not do: an FP8 layer in other types, TF32, a second stream."""
        faults = []
        for layer in self.fp8_layers:
            products = self._products_of(layer)
            if not products:
                faults.append(f"{layer}: expected an FP8 product, got none")
            faults += [
                f"{layer}: expected {_text(FP8_PRODUCT)}, got {_text(product.types)}"
                for product in products
                if not product.is_fp8
            ]
        if self.tf32:
            faults.append("expected fp32 products in fp32, got TF32")
        if self.streams != 1:
            faults.append(f"expected 1 stream, got {self.streams}")
        return faults

    @property
    def fp8_products(self) -> int:
        """How many of the FP8 layers are FP8 products, and nothing else."""
        products = [self._products_of(layer) for layer in self.fp8_layers]
        return sum(bool(made) and all(p.is_fp8 for p in made) for made in products)

    def _products_of(self, layer: str) -> list[Product]:
        return [product for product in self.products if layer in product.layers]


def _text(types: tuple[str, str, str]) -> str:
    activation, weight, result = types
    return f"{activation} × {weight} → {result}"
