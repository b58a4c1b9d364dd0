"""Q-chunking with a distilled policy (QC-FQL) as a plain PyTorch loop: FQL's, of chunks."""

from __future__ import annotations

from peers import common, plain
from peers.flops import QC_LENGTH
from peers.fql_plain import FQL, Windows, checked

if __name__ == "__main__":
    plain.main(lambda check: checked(QC_LENGTH) if check else FQL(QC_LENGTH), Windows, chunk=common.CHUNKS["qc"])
