"""Files of rows with columns: CSV, and what `datasets` reads (Parquet, folders of `Dataset.save_to_disk`)."""

from __future__ import annotations

import csv
import glob
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from carpool.train.data.rows import Fields, Reader, Row, Url, open_file


class Csv(Reader):
    """All values are texts, of columns that the first line names."""

    name, what = "csv", "CSV file"
    endings = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    def names(self, path: Path | Url, splits: Sequence[str]) -> list[str]:
        with open_file(path) as file, _readable(path):
            return list(_table(file, path).fieldnames or ())

    def rows(self, path: Path | Url, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
        with open_file(path) as file, _readable(path):
            table = _table(file, path)
            names = list(table.fieldnames or ())
            wanted.check(names, str(path), "column")
            for row in table:
                where = f"{path}, line {table.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{where} has not as many values as the first line has columns ({len(names)})")
                yield Row(row, where)


@contextmanager
def _readable(path: Path | Url) -> Iterator[None]:
    try:
        yield
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV of UTF-8: {error}") from None


def _table(file: Any, path: Path | Url) -> csv.DictReader[str]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    return csv.DictReader(text, delimiter="\t" if ".tsv" in path.name.lower() else ",")


class Parquet(Reader):
    name, what = "parquet", "Parquet file"
    endings: ClassVar[tuple[str, ...]] = (".parquet",)

    def names(self, path: Path | Url, splits: Sequence[str]) -> list[str]:
        return list(self._open(path, splits).column_names or ())

    def rows(self, path: Path | Url, wanted: Fields, splits: Sequence[str]) -> Iterator[Row]:
        dataset = self._open(path, splits)
        names = list(dataset.column_names or ())
        wanted.check(names, str(path), "column")
        columns = [name for name in (*wanted.required, *wanted.optional) if name in names]
        batches, number = dataset.select_columns(columns).iter(batch_size=256), 0
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # of a file that is damaged further on
                raise ValueError(f"{path} is no readable {self.what}: {error}") from None
            if batch is None:
                return
            for values in zip(*(batch[name] for name in columns), strict=True):
                fields = {name: _without_nulls(value) for name, value in zip(columns, values, strict=True)}
                yield Row(fields, f"{path}, row {number}")
                number += 1

    def _open(self, path: Path | Url, splits: Sequence[str]) -> Any:
        """A dataset, whose rows have yet to be read."""
        import datasets

        try:
            return self._dataset(datasets, path, splits)
        except Exception as error:  # whatever a damaged file makes it raise
            raise ValueError(f"{path} is no readable {self.what}: {error}") from None

    def _dataset(self, datasets: Any, path: Path | Url, splits: Sequence[str]) -> Any:
        # What is named there is a pattern.
        file = path.address if isinstance(path, Url) else glob.escape(str(path))
        return datasets.load_dataset("parquet", data_files=[file], split="train", streaming=True)


class SavedDataset(Parquet):
    name, what = "dataset", "Hugging Face dataset folder"
    endings = ()

    def files(self, path: Path) -> list[Path]:
        return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))

    def _dataset(self, datasets: Any, path: Path | Url, splits: Sequence[str]) -> Any:
        dataset = datasets.load_from_disk(str(path))
        if not isinstance(dataset, datasets.DatasetDict):
            return dataset
        split = next((name for name in splits if name in dataset), None)
        if split is None:
            raise ValueError(
                f"it has no split {' or '.join(splits)}, but {', '.join(dataset)}; name the folder of one split, "
                f"such as {path}/{next(iter(dataset), '')}"
            )
        return dataset[split]


def _without_nulls(value: Any) -> Any:
    """Tables give every object the keys of all others, and null where it has none of its own."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
