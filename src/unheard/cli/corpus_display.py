"""A store's exact counts in a terminal, under a heading that says whom they are for."""

from rich.console import Console
from rich.table import Table

from unheard.corpus.store import TokenStore
from unheard.corpus.store_stats import PERCENTILES, SplitStatistics, cap_effect, split_statistics

console = Console()


def print_store(store: TokenStore, weight_cap: int | None) -> None:
    info = store.info
    words = info["vocabulary"]
    console.print(
        f"[bold]{info.get('name', store.path.name)}[/]{'  (synthetic)' if info.get('synthetic') else ''}",
        highlight=False,
    )
    console.print(f"vocabulary: {words['size']} words, {words['kind']}{_source(words)}", highlight=False)
    console.print(f"tokens: {info.get('tokens', {}).get('kind', 'not recorded')}", highlight=False)
    console.print("\n[bold red]Exact statistics of private users: for the owner of the data, unsafe to publish.[/]\n")
    for name in ("train", "held_out", "public", "test_posts"):
        users = getattr(store, name)
        if users is not None and users.num_users:
            _print_split(name, split_statistics(users))
    if weight_cap is not None:
        effect = cap_effect(store, weight_cap)
        console.print(
            f"[bold]weight cap {weight_cap}[/]: {100 * effect.users_at_cap:.1f} % of training users reach it; "
            f"mean weight {effect.mean_weight:.3f}, total weight {effect.total_weight:,.1f}",
            highlight=False,
        )


def _print_split(name: str, found: SplitStatistics) -> None:
    unit = "post" if name == "test_posts" else "user"
    console.print(
        f"[bold]{name}[/]: {found.users:,} {unit}s, {found.tokens:,} tokens, {found.posts:,} sequences, "
        f"{100 * found.out_of_dictionary:.2f} % of words out of the dictionary, "
        f"largest {unit} {100 * found.largest_user_share:.2f} %",
        highlight=False,
    )
    table = Table(title=f"tokens a {unit}", title_justify="left", show_edge=False)
    for percent in PERCENTILES:
        table.add_column(f"{percent} %", justify="right")
    table.add_row(*(f"{value:,}" for value in found.percentiles))
    console.print(table)
    most = max((n for _, _, n in found.histogram), default=0)
    for begin, end, number in found.histogram:
        if number:
            console.print(
                f"  {begin:>9,} - {end:>9,} {number:>11,} {'█' * max(1, round(40 * number / most))}", highlight=False
            )
    console.print()


def _source(words: dict) -> str:
    return f" ({words['source']})" if words.get("source") else ""
