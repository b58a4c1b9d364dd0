"""The fuzzer of the loaders: small files of every layout that offrl reads, most of them damaged, each loaded and
judged.

    python -m tests.fuzz --cases 10000 --seed 0               # a table of outcomes; failing files under fuzz-failures/
    python -m tests.fuzz --minutes 30 --layout minari --seed 7
    python -m tests.fuzz --replay fuzz-failures/minari-0-17   # one of them again, with what the oracle and offrl say
    python -m tests.fuzz --replay some/file.hdf5              # or any other file
    python -m tests.fuzz --tree ../other                      # the offrl of another checkout

A case is a layout, a seed and a number: `drafts` makes the columns of a valid file (of random episodes, or an excerpt
of a real file), `slips` changes columns as a person's own script might, `containers` writes them, and `links`,
`archives`, `tables` and `damage` change what was written: links and storage of HDF5, members of zips, Parquet columns,
JSON, single bytes. `oracle`, written apart from `offrl.data` and in plain loops, reads the file slowly and says which
episodes it holds, that it must be refused, or that either is fine. A case ends as

    right        the dataset holds the oracle's episodes
    refused      one line that names the file, where that is due or fine
    strict       refused, though the oracle finds nothing wrong
    unclear      refused, in several lines or without naming the file
    wrong        other episodes, or loaded though it must not
    traceback    anything but a `UserError`
    memory       took more than `case.MEMORY` MB beside the file
    crash, hang  the process died, or took more than `runner.SECONDS`

and all but the first two are failures. (`library`, which is none: the process died while the oracle read the file with
h5py or pyarrow alone.) Cases run in a process of their own, whose address space is limited.
"""
