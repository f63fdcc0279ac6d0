"""Counts for people. Here because every package may import this one."""


def counted(number: int, what: str) -> str:
    """1 rank, 2 batches, 2,000 ranks."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"
