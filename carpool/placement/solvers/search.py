"""Local search on the exact objective: swaps experts between ranks while this reduces sends within the load limit.

A token has count[t, w] experts on rank w, and costs one send for each w with count > 0. Moving expert e from rank a to
b changes the sends of the tokens that chose e by

    - 1 where count[t, a] = 1     e is *alone* there, the send to a is saved          leave[e]
    + 1 where count[t, b] = 0     a new send to b                                    enter[e, b]

A swap of e (on a) and f (on b) is two moves, but the counts of a token that chose both do not change. There the two
moves were credited [e alone on a] + [f alone on b], which is given back: pair[e, f] + pair[f, e], with pair[e, f] the
number of tokens that chose both and have e alone. So the gain of all E x E swaps is a sum of four small tables,

    change[e, f] = - leave[e] + enter[e, b] + pair[e, f]  - leave[f] + enter[f, a] + pair[f, e]

and a step takes the best of all swaps. Only tokens that chose e or f (about 2 K / E of them) have other counts
afterwards; only their part of the tables is updated: a step costs a few ms at 256 experts and 20k tokens.

- Several nodes: there is a second set of tables, with nodes in place of ranks, weighted by how much slower inter-node
  links are.
- Load: each pair above the limit costs several sends (`OVERLOAD`), so overload is reduced first and does not return. In
  the first descents it has less weight (`EASED`). The search aims below the limit (`MARGIN`), because other data has
  other loads.
- Free capacity is an expert that no token chose. Swapping an expert with it moves the expert.
- At a local optimum the search makes a few random swaps and descends again, `KICKS` times, and takes the best result.
  (200 steps of tabu search instead were at most 0.4 % better, and slower.)

It starts from the better of two layouts: by co-activation of experts (`by_pairs`), and by load (`plain.lpt`).

Measured on traces with topics (64 or 256 experts, top-8, 8 ranks, 10k tokens, another 10k held out), ranks per token
without a load limit: Occult's greedy 4.473 / 4.803, Mt-KaHyPar 4.330 / 4.790, this from Occult's 4.325 / 4.744, this
from Mt-KaHyPar's 4.274 / 4.704. Their loads are 1.6 to 2.2 times the mean; with the limit of 1.1, 4.466 / 4.892 from
Occult's: if experts of one topic have high loads together, balance costs sends.
"""

from __future__ import annotations

import numpy as np

from carpool.layout import ExpertLayout
from carpool.placement.solvers.problem import OVERLOAD, Problem, homes_of
from carpool.placement.trace import Array

# Shares of OVERLOAD in successive descents, so that good groups form before balance dominates.
EASED = (0.1, 0.25, 0.5, 1.0)
MARGIN = 0.5  # the search aims at 1 + MARGIN * (load limit - 1)
KICKS = 6


def search(problem: Problem, *starts: ExpertLayout) -> ExpertLayout:
    """Local search from the better of `starts`."""
    return problem.layout(swap_search(problem, *map(homes_of, starts)))


def aimed_load(problem: Problem) -> Array:
    """(W,) pairs that the search allows on each rank, in proportion to the ranks' speeds."""
    mean = problem.trace.load_E.sum() / problem.num_ranks
    allowed_W: Array = mean * (1 + MARGIN * (problem.load_limit - 1)) * problem.cost.speed_W(problem.num_ranks)
    return allowed_W


def swap_search(problem: Problem, *starts_E: Array) -> Array:
    """(E,) ranks after local search from the given ranks, within the capacity of each rank."""
    states = []
    for rank_E in starts_E:
        free_W = problem.capacity_W - np.bincount(rank_E, minlength=problem.num_ranks)
        state = _State(problem, np.concatenate([rank_E, np.repeat(np.arange(problem.num_ranks), free_W)]))
        for share in EASED:
            state.descend(share)
        states.append(state)
    state = min(states, key=_State.cost)
    draw = np.random.default_rng(problem.seed)
    best_cost, best_X = state.cost(), state.rank_X.copy()
    for _ in range(KICKS):
        for _ in range(max(2, len(best_X) // 24)):
            one, other = draw.integers(0, len(best_X), 2)
            if state.rank_X[one] != state.rank_X[other]:
                state.swap(int(one), int(other))
        for share in EASED[1:]:
            state.descend(share)
        cost = state.cost()
        if cost < best_cost - 1e-9:
            best_cost, best_X = cost, state.rank_X.copy()
        else:
            state.go_to(best_X)
    return best_X[: problem.num_experts]


def by_pairs(problem: Problem) -> ExpertLayout:
    """Fills ranks greedily by co-activation, as in Occult (ICML 2025): first nodes, then the ranks of each.

    A rank starts with the pair of unplaced experts that tokens choose together most often. The expert with the largest
    sum of co-activations with those on the rank follows, until the rank is full. An expert that the same tokens choose
    with two of the rank's experts counts twice, although it saves one send; load is ignored."""
    together_EE = problem.trace.coactivation_EE.copy()
    np.fill_diagonal(together_EE, 0)
    fill_N = np.bincount(problem.node_W, weights=problem.fill_W).astype(np.int64)
    node_E = _groups_by_pairs(together_EE, np.arange(problem.num_experts), fill_N)
    rank_E = np.empty(problem.num_experts, dtype=np.int64)
    for node in range(problem.num_nodes):
        experts, ranks = np.flatnonzero(node_E == node), np.flatnonzero(problem.node_W == node)
        rank_E[experts] = ranks[_groups_by_pairs(together_EE, experts, problem.fill_W[ranks])]
    return problem.layout(rank_E)


def _groups_by_pairs(together_EE: Array, experts: Array, capacity_G: Array) -> Array:
    """(len(experts),) the group of each given expert; groups of the sizes `capacity_G` are filled one by one."""
    among = together_EE[np.ix_(experts, experts)].astype(np.float64)
    group = np.full(len(experts), -1)
    for number, capacity in enumerate(capacity_G):
        if capacity == 0:
            continue
        free = group < 0
        pairs = np.where(free[:, None] & free[None, :], among, -1.0)
        first = int(pairs.max(1).argmax())
        group[first] = number
        attraction = among[first].copy()
        for _ in range(int(capacity) - 1):
            best = int(np.where(group < 0, attraction, -1.0).argmax())
            group[best] = number
            attraction += among[best]
    return group


class _Level:
    """The tables of the module's docstring for one way of grouping experts: by rank, or by node."""

    def __init__(self, expert_TK: Array, group_X: Array, num_groups: int) -> None:
        self.expert_TK, self.group_X = expert_TK, group_X.copy()
        self.num_groups, self.size = num_groups, len(group_X)
        self.pair_XX = np.zeros((self.size, self.size))
        self.enter_XG = np.zeros((self.size, num_groups))
        self.count_TG = np.zeros((len(expert_TK), num_groups), dtype=np.int16)
        self._recount(np.arange(len(expert_TK)))
        self._enter_tables(slice(None), 1.0)

    def _recount(self, tokens: Array) -> None:
        group_RK = self.group_X[self.expert_TK[tokens]]
        flat = np.arange(len(tokens))[:, None] * self.num_groups + group_RK
        count = np.bincount(flat.ravel(), minlength=len(tokens) * self.num_groups)
        self.count_TG[tokens] = count.reshape(len(tokens), self.num_groups)

    def _enter_tables(self, tokens: Array | slice, sign: float) -> None:
        """Add (or subtract) the contributions of these tokens."""
        expert_RK, count_RG = self.expert_TK[tokens], self.count_TG[tokens]
        alone_RK = np.take_along_axis(count_RG, self.group_X[expert_RK], axis=1) == 1
        row, column = np.nonzero(alone_RK)
        flat = expert_RK[row, column][:, None] * self.size + expert_RK[row]
        self.pair_XX += sign * np.bincount(flat.ravel(), minlength=self.size**2).reshape(self.size, self.size)
        row, group = np.nonzero(count_RG == 0)
        flat = expert_RK[row] * self.num_groups + group[:, None]
        enter = np.bincount(flat.ravel(), minlength=self.size * self.num_groups)
        self.enter_XG += sign * enter.reshape(self.size, self.num_groups)

    def set_groups(self, group_X: Array, tokens: Array) -> None:
        """Change the groups of experts; `tokens` are all tokens that chose one whose group changed."""
        if (group_X == self.group_X).all():
            return
        self._enter_tables(tokens, -1.0)
        self.group_X = group_X.copy()
        self._recount(tokens)
        self._enter_tables(tokens, 1.0)

    def changes_XX(self) -> Array:
        """The change of sends by each swap. The diagonal of `pair` is `leave`."""
        half_XX = self.pair_XX - np.diag(self.pair_XX)[:, None] + self.enter_XG[:, self.group_X]
        return np.where(self.group_X[:, None] == self.group_X, 0.0, half_XX + half_XX.T)

    def sends(self) -> float:
        return float(np.count_nonzero(self.count_TG))


class _State:
    """The state of the search. X: experts, and free capacity as experts without tokens."""

    def __init__(self, problem: Problem, rank_X: Array) -> None:
        self.expert_TK = problem.trace.expert_TK.astype(np.int64)
        self.rank_X, self.num_ranks, self.node_W = rank_X.copy(), problem.num_ranks, problem.node_W
        self.load_X = np.zeros(len(rank_X))
        self.load_X[: problem.num_experts] = problem.trace.load_E
        self.allowed = aimed_load(problem)
        self.levels = [(problem.rank_weight, _Level(self.expert_TK, rank_X, problem.num_ranks))]
        if problem.node_weight:
            level = _Level(self.expert_TK, self.node_W[rank_X], problem.num_nodes)
            self.levels.append((problem.node_weight, level))
        self.overload = OVERLOAD * sum(weight for weight, _ in self.levels)
        self.tokens_of = _tokens_of(self.expert_TK, len(rank_X))

    def load_W(self) -> Array:
        return np.bincount(self.rank_X, weights=self.load_X, minlength=self.num_ranks)

    def cost(self) -> float:
        sends = sum(weight * level.sends() for weight, level in self.levels)
        return sends + self.overload * float(np.maximum(self.load_W() - self.allowed, 0).sum())

    def swap(self, one: int, other: int) -> None:
        tokens = np.union1d(self.tokens_of[one], self.tokens_of[other])
        self.rank_X[[one, other]] = self.rank_X[[other, one]]
        self._follow(tokens)

    def go_to(self, rank_X: Array) -> None:
        changed = np.flatnonzero(rank_X != self.rank_X)
        tokens = np.unique(np.concatenate([self.tokens_of[x] for x in changed])) if len(changed) else np.empty(0, int)
        self.rank_X = rank_X.copy()
        self._follow(tokens)

    def _follow(self, tokens: Array) -> None:
        for number, (_, level) in enumerate(self.levels):
            level.set_groups(self.node_W[self.rank_X] if number else self.rank_X, tokens)

    def descend(self, share: float = 1.0) -> None:
        """Make the best of all swaps, while one improves the cost; overload is weighted by `share`."""
        for _ in range(20 * len(self.rank_X)):
            change_XX = self.changes_XX(share)
            best = int(np.argmin(change_XX))
            if change_XX.flat[best] > -1e-6:
                return
            self.swap(*divmod(best, len(self.rank_X)))

    def changes_XX(self, share: float = 1.0) -> Array:
        """The change of the cost by each swap; zero between experts of one rank."""
        change_XX = np.zeros((len(self.rank_X), len(self.rank_X)))
        for weight, level in self.levels:
            change_XX += weight * level.changes_XX()
        load_W, allowed_X = self.load_W(), self.allowed[self.rank_X]
        if (load_W > self.allowed - self.load_X.max()).any():
            after_XX = (load_W[self.rank_X] - self.load_X)[:, None] + self.load_X
            before_X = np.maximum(load_W - self.allowed, 0)[self.rank_X]
            penalty_XX = np.maximum(after_XX - allowed_X[:, None], 0) - before_X[:, None]
            other_XX = self.rank_X[:, None] != self.rank_X
            change_XX += share * self.overload * np.where(other_XX, penalty_XX + penalty_XX.T, 0)
        return change_XX


def _tokens_of(expert_TK: Array, size: int) -> list[Array]:
    """For each expert, the tokens that chose it, ascending."""
    order = np.argsort(expert_TK.ravel(), kind="stable")
    ends = np.cumsum(np.bincount(expert_TK.ravel(), minlength=size))[:-1]
    return np.split(order // expert_TK.shape[1], ends)
