"""Max-min fairness as it is defined, over any links: what the rates of the simulator are held to."""

from collections.abc import Hashable, Iterable, Mapping
from math import inf


def fair_rates(uses: Mapping[int, Iterable[Hashable]], capacity: Mapping[Hashable, float]) -> dict[int, float]:
    """Max-min fair rates of transfers over links of given capacity; infinite for one that uses no link."""
    left, rates = dict(capacity), dict[int, float]()
    open_ = {transfer: [link for link in links if link in left] for transfer, links in uses.items()}
    while open_:
        load: dict[Hashable, int] = {}
        for links in open_.values():
            for link in links:
                load[link] = load.get(link, 0) + 1
        if not load:
            return rates | dict.fromkeys(open_, inf)
        tightest = min(load, key=lambda link: left[link] / load[link])
        rate = left[tightest] / load[tightest]
        for transfer in [transfer for transfer, links in open_.items() if tightest in links]:
            rates[transfer] = rate
            for link in open_.pop(transfer):
                left[link] = max(0.0, left[link] - rate)
    return rates
