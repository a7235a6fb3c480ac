"""Known mistakes in the sources, each with the printed version, its correction, and a check that tells the two apart.

fa2-lab errata            check all errata
fa2-lab errata ID         check one erratum and print it in full
"""

from fa2_lab.errata import article, fa1_paper, fa2_paper, notes
from fa2_lab.errata.erratum import Erratum, Verdict, measure

ERRATA: dict[str, Erratum] = {e.id: e for source in (fa2_paper, fa1_paper, notes, article) for e in source.ERRATA}

SOURCES = {  # {short name, as in Erratum.source: full reference}
    "FA1 paper": "Dao, Fu, Ermon, Rudra, Ré: FlashAttention (2022), arXiv:2205.14135",
    "FA2 paper": "Dao: FlashAttention-2, arXiv:2307.08691 (2023). Marked (arXiv): not in the version of ICLR 2024",
    "article on FA2": "FlashAttention II: better work partitioning (kernelengineering.vizuara.ai)",
    "lecture notes on FA2": "an outline of the FA2 paper, heading by heading, dated 18 Jul 2023; author unknown",
    "bilingual notes on FA2": "the FA2 paper's abstract and algorithms in English and Chinese; author unknown",
}

__all__ = ["ERRATA", "SOURCES", "Erratum", "Verdict", "measure"]
