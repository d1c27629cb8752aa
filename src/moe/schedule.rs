//! Work cut into tasks, and who takes the next one.
//!
//! Owns: the sizes of tasks, the list of (expert, rows, columns) tasks with heavy experts first, and the counter that deals them out. Must
//! not know: what a task does. Which thread does a task never changes a result: a task computes each of its values alone, in one order.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::route::Routing;

/// Intermediate rows of a task of the first phase: one activation block, so that the task that computes them can also quantise them.
pub(super) const ROWS: usize = 256;

/// Most token rows of a task: they amortise the unpacking of weights, and leave some of the second-level cache to the rows that come next
/// and to weights.
pub(super) const COLUMNS: usize = 80;

const _: () = assert!(COLUMNS <= super::kernels::MOST_COLUMNS);

/// The token rows of one expert in runs of at most [`COLUMNS`], all of about the same length: a short one costs as much unpacking as a long one.
pub(super) fn runs(start: usize, total: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let count = total.div_ceil(COLUMNS);
    (0..count).map(move |i| start + total * i / count..start + total * (i + 1) / count)
}

/// Fewest output rows of a task of the second phase.
pub(super) const OUT_ROWS: usize = 64;

/// Output rows of a task of the second phase: 64, or up to 256 where that leaves four tasks for each thread. Every task reads the activations
/// of all experts, so larger ones read them less often; no value depends on it.
pub(super) fn out_rows(rows: usize, threads: usize) -> usize {
    [ROWS, ROWS / 2].into_iter().find(|n| rows / n >= 4 * threads).unwrap_or(OUT_ROWS)
}

/// One task of the first phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Task {
    /// Whose weights.
    pub(super) expert: usize,
    /// Which rows, in blocks of [`ROWS`].
    pub(super) block: usize,
    /// First of its sorted pairs.
    pub(super) first: usize,
    /// How many pairs.
    pub(super) columns: usize,
}

/// Upper bound of the number of tasks, for the size of the workspace.
pub(super) fn max_tasks(experts: usize, pairs: usize, rows: usize) -> usize {
    // As many runs as fill `COLUMNS`, and one more per active expert.
    experts.min(pairs).saturating_add(pairs / COLUMNS).saturating_mul(rows.div_ceil(ROWS))
}

/// `u32`s per task in the list.
pub(super) const TASK_WORDS: usize = 4;

/// Writes all tasks to `list`, and returns their number. Heavy experts come first, so that what is left for the end is small; but those whose
/// weights are `late` come last.
pub(super) fn list_tasks(routing: &Routing<'_>, rows: usize, late: impl Fn(usize) -> bool, list: &mut [u32]) -> usize {
    let mut count = 0;
    let late = &late;
    let of = |turn| routing.active.iter().filter(move |e| late(**e as usize) == turn);
    for &expert in of(false).chain(of(true)) {
        let (start, total) = (routing.starts[expert as usize] as usize, routing.count(expert as usize));
        for run in runs(start, total) {
            for block in 0..rows.div_ceil(ROWS) {
                let words = [expert, block as u32, run.start as u32, run.len() as u32];
                list[TASK_WORDS * count..][..TASK_WORDS].copy_from_slice(&words);
                count += 1;
            }
        }
    }
    count
}

/// Task `i` of a list.
pub(super) fn task(list: &[u32], i: usize) -> Task {
    let w = &list[TASK_WORDS * i..][..TASK_WORDS];
    Task { expert: w[0] as usize, block: w[1] as usize, first: w[2] as usize, columns: w[3] as usize }
}

/// Deals out the numbers `0..count`, each once.
#[derive(Debug)]
pub(super) struct Dealer {
    next: AtomicUsize,
    count: usize,
}

impl Dealer {
    /// For this many tasks.
    pub(super) fn new(count: usize) -> Self {
        Dealer { next: AtomicUsize::new(0), count }
    }

    /// The next number. `None` when there is none left.
    pub(super) fn deal(&self) -> Option<usize> {
        let i = self.next.fetch_add(1, Ordering::Relaxed);
        (i < self.count).then_some(i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_cover_every_pair_and_block_once_heaviest_first() {
        let starts = [0u32, 1, 301, 301, 304];
        let pairs: Vec<u32> = (0..304).collect();
        let routing = Routing { starts: &starts, pairs: &pairs, active: &[1, 3, 0], used: 2 };
        let bound = max_tasks(4, 304, 600);
        let mut list = vec![0; TASK_WORDS * bound];
        let count = list_tasks(&routing, 600, |_| false, &mut list);
        assert!(count <= bound);
        assert_eq!(count, (4 + 1 + 1) * 3);
        assert_eq!(runs(7, 161).map(|r| (r.start, r.end)).collect::<Vec<_>>(), [(7, 60), (60, 114), (114, 168)]);
        assert_eq!(runs(7, 0).count(), 0);
        let mut seen = vec![[0; 3]; 304];
        for i in 0..count {
            let t = task(&list, i);
            assert!(starts[t.expert] as usize <= t.first && t.first + t.columns <= starts[t.expert + 1] as usize);
            seen[t.first..t.first + t.columns].iter_mut().for_each(|s| s[t.block] += 1);
        }
        assert!(seen.iter().all(|s| *s == [1; 3]));
        assert_eq!((task(&list, 0).expert, task(&list, count - 1).expert), (1, 0));
        assert_eq!(list_tasks(&routing, 600, |e| e == 1, &mut list), count);
        assert_eq!([0, 3, 6, count - 1].map(|i| task(&list, i).expert), [3, 0, 1, 1]);
    }

    #[test]
    fn every_number_is_dealt_once() {
        let dealer = Dealer::new(1000);
        let taken: Vec<Vec<usize>> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..4).map(|_| s.spawn(|| std::iter::from_fn(|| dealer.deal()).collect())).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let mut all: Vec<usize> = taken.concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
    }
}
