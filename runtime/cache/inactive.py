"""The rows of finished sequences, kept for later prompts that begin alike.

They lie packed against the end of the cache, without gaps. The least recently used gives way first
to anything that an active sequence needs.
"""

from array import array
from itertools import permutations

from runtime.cache.sequences import InactiveSequence, RowMove, common_prefix


class InactiveRows:
    """`sequences` has the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sequences: list[InactiveSequence] = []
        self.evictions = 0

    @property
    def count(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def touch(self, sequence: InactiveSequence) -> None:
        """Make it the most recently used."""
        self.sequences.remove(sequence)
        self.sequences.append(sequence)

    def touch_holder(self, tokens: "array[int]") -> bool:
        """Touch a sequence that begins with these tokens; False where there is none."""
        for sequence in self.sequences:
            if common_prefix(sequence.tokens, tokens) == len(tokens):
                self.touch(sequence)
                return True
        return False

    def add(self, tokens: "array[int]", active_rows: int) -> tuple[list[RowMove], int]:
        """Hold a sequence that fits behind so many active rows, in place of those it begins with.

        Returns the moves that make room, and the row that it starts at.
        """
        self.sequences = [
            s for s in self.sequences if common_prefix(s.tokens, tokens) < len(s.tokens)
        ]
        moves = self.make_room(active_rows + len(tokens))
        start = self.capacity - self.count - len(tokens)
        self.sequences.append(InactiveSequence(tokens, start))
        return moves, start

    def make_room(self, rows: int, spared: InactiveSequence | None = None) -> list[RowMove]:
        """Drop sequences until the first `rows` rows are free of them; pack the others."""
        while self.capacity - self.count < rows and self.sequences[0] is not spared:
            del self.sequences[0]
            self.evictions += 1
        moves, end = [], self.capacity
        for sequence in self._from_the_end():
            end -= len(sequence.tokens)
            moves.append(RowMove(sequence.start, end, len(sequence.tokens)))
            sequence.start = end
        return moves

    def check(self) -> None:
        """Every invariant; raises AssertionError naming the one that broke."""
        end = self.capacity
        for sequence in self._from_the_end():
            assert sequence.tokens, "an inactive sequence of no rows"
            packed = sequence.start + len(sequence.tokens) == end
            assert packed, f"inactive rows not packed below {end}"
            end = sequence.start
        for a, b in permutations(self.sequences, 2):
            assert common_prefix(a.tokens, b.tokens) < len(a.tokens), "a prefix held twice"

    def _from_the_end(self) -> list[InactiveSequence]:
        return sorted(self.sequences, key=lambda sequence: -sequence.start)
