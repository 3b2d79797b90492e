"""What `python -m sparse_attn plan` prints."""

from __future__ import annotations

from sparse_attn.roofline import LINK


def show(numbers: dict) -> None:
    """Print what cli.plan found."""
    bounds, target, workspace = numbers["bounds"], numbers["target"], numbers["workspace"]
    print(f"{numbers['model']} on {target['vendor']} {target['arch']}")
    print(", ".join(f"{name} {value}" for name, value in bounds.items() if value is not None and name != "mesh"))
    weights = {f"{kind} weights": nbytes for kind, nbytes in numbers["weights"].items() if nbytes}
    wide = max(map(len, (*weights, *(f"{kind} cache" for kind in numbers["caches"]))))
    print(f"\n{'':<{wide}} {'layout':<36} {'B/token/layer':>13} {'layers':>6} {'B/token':>8} {'bytes':>19}")
    for kind, cache in numbers["caches"].items():
        print(
            f"{kind + ' cache':<{wide}} {cache['layout']:<36} {cache['bytes_per_token_and_layer']:>13} "
            f"{cache['layers']:>6} {cache['bytes_per_token']:>8} {cache['bytes']:>19,}"
        )
    totals = (
        *((kind, "", nbytes) for kind, nbytes in weights.items()),
        ("weights", _weights(numbers), numbers["weight_bytes"]),
        ("caches", f"{numbers['blocks']} blocks of {bounds['block_size']} tokens", numbers["cache_bytes"]),
        (
            "workspace",
            f"scratch {workspace['scratch_bytes']:,}, counters {workspace['counter_bytes']:,}",
            workspace["bytes"],
        ),
        ("gathered", "keys of a step's prefill rows, of a layer", numbers["gathered_bytes"]),
        ("activations", "of a step, at most", numbers["activation_bytes"]),
        ("in all", "", numbers["bytes"]),
    )
    for what, of, nbytes in totals:
        print(f"{what:<{wide}} {of:<66} {nbytes:>19,}")
    _show_gpus(numbers)


def _weights(numbers: dict) -> str:
    if numbers["format"] == "bf16":
        return f"of {numbers['bounds']['dtype']}"
    return f"{numbers['format']}; files {numbers['file_bytes']:,} ({numbers['file_bytes'] / 2**30:.2f} GiB)"


def _show_gpus(numbers: dict) -> None:
    """A line for every number of GPUs: the bytes of one of them, and the cards that they fit."""
    cards = "".join(f" {card:>7}" for card in numbers["cards"])
    print(f"\n{'GPUs':<4} {'weights GB':>10} {'caches':>8} {'workspace':>9} {'gathered':>8} {'activations':>11} "
          f"{'each':>8} {'sent MB/step':>12} {'ms':>6}{cards}")  # fmt: skip
    for rank in numbers["gpus"]:
        if "refused" in rank:
            print(f"{rank['gpus']:<4} {rank['refused']}")
            continue
        sizes = (rank["weight_bytes"], rank["cache_bytes"], rank["workspace"]["bytes"], rank["gathered_bytes"],
                 rank["activation_bytes"], rank["bytes"])  # fmt: skip
        widths = (10, 8, 9, 8, 11, 8)
        columns = " ".join(f"{nbytes / 1e9:>{wide}.2f}" for nbytes, wide in zip(sizes, widths))
        fits = "".join(f" {'fits' if fits else '-':>7}" for fits in rank["fits"].values())
        sent = sum(rank["collective_bytes_per_step"].values()) / 1e6
        wire = rank["collective_us_per_step"] / 1e3
        print(f"{rank['gpus']:<4} {columns} {sent:>12.2f} {wire:>6.2f}{fits}{_sharded(rank)}")
    sharding = numbers["sharding"]
    print(f"sharded {sharding['dealt']}")
    print(f"on every GPU: {sharding['replicated']}")
    sizes = ", ".join(f"{card} {size / 1e9:.0f} GB" for card, size in numbers["cards"].items())
    print(f"cards: {sizes}; without what the driver and the allocator take")
    print(f"ms: of a step's collectives where no rank waits for another; {LINK.name}")


def _sharded(rank: dict) -> str:
    """The sizes of a grid that is more than tensor ranks with as many expert ranks."""
    sizes, rows = rank["ranks"], rank.get("max_batched_tokens")
    few = "" if rows is None else f", {rows} tokens a step"  # than asked for, whose scores would not fit
    if sizes["tensor"] == sizes["expert"] == rank["gpus"]:
        return few
    way = rank["experts"]["way"]
    shared = "" if way == "replicated" else f", experts by {way}"
    return "  " + ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) + shared + few
