//! Bringing weights into memory before they are read, as the operation sees it.
//!
//! Owns: the interface [`Ahead`], and the way through the weights of one call: everything that a phase needs is asked for at once, by all
//! threads, gate and up before down; what is there already is computed first. Must not know: pages, files, when it is worth a look.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use super::Experts;
use super::args::Matrix;
use super::pool::ParallelFor;
use super::route::Routing;
use super::schedule::Dealer;
use super::span::Span;
use crate::error::{Error, Result};

/// Most bytes that are asked for before the first product. What a batch needs beyond is asked for while it is computed, so that it does not
/// push out what came first.
const WINDOW: usize = 256 << 20;

/// Who brings weights into memory.
pub trait Ahead: Sync {
    /// A call begins. Whether weights have to be asked for at all.
    fn begin(&self) -> bool;
    /// Asks for these bytes, without waiting. Whether some were missing, so that [`Ahead::wait`] is needed.
    fn ask(&self, weights: Span) -> bool;
    /// Looks again at bytes that were all there, and asks for what has gone since. Whether some have.
    fn ask_again(&self, weights: Span) -> bool;
    /// How many experts of the call had all their weights in memory, and how many had not.
    fn seen(&self, hits: usize, misses: usize);
    /// Waits for bytes that were asked for.
    ///
    /// # Errors
    /// If they cannot be had.
    fn wait(&self, weights: Span) -> Result<()>;
    /// A call that was begun with "yes" is over; it had this many threads.
    fn end(&self, threads: usize);
}

/// Nobody does: memory is memory.
#[derive(Clone, Copy, Debug)]
pub struct Never;

impl Ahead for Never {
    fn begin(&self) -> bool {
        false
    }
    fn ask(&self, _: Span) -> bool {
        false
    }
    fn ask_again(&self, _: Span) -> bool {
        false
    }
    fn seen(&self, _: usize, _: usize) {}
    fn wait(&self, _: Span) -> Result<()> {
        Ok(())
    }
    fn end(&self, _: usize) {}
}

/// The matrices that are needed first, and those that are needed after them.
pub(super) const FIRST: usize = 0;
pub(super) const SECOND: usize = 1;

/// One call's way through its weights.
pub(super) struct Way<'a> {
    ahead: &'a dyn Ahead,
    matrices: [&'a [Matrix<'a>]; 2],
    active: &'a [u32],
    /// By expert: bit 0 if something of the first matrices was missing, bit 1 of the second.
    missed: &'a [AtomicU8],
    threads: usize,
    /// First matrices of all active experts, then the second ones.
    asks: Dealer,
    asked: AtomicUsize,
    failed: OnceLock<Error>,
}

impl<'a> Way<'a> {
    /// Asks for what the call needs, up to a window. `None` if nothing has to be asked for. `missed` has a zero for each expert.
    pub(super) fn new(
        ahead: &'a dyn Ahead,
        matrices: [&'a [Matrix<'a>]; 2],
        routing: &Routing<'a>,
        missed: &'a [AtomicU8],
        team: &dyn ParallelFor,
    ) -> Option<Way<'a>> {
        if !ahead.begin() {
            return None;
        }
        let (active, threads) = (routing.active, team.threads());
        let phases = if matrices[SECOND].is_empty() { 1 } else { 2 };
        let asks = Dealer::new(phases * active.len());
        let way = Way { ahead, matrices, active, missed, threads, asks, asked: AtomicUsize::new(0), failed: OnceLock::new() };
        team.run(&|_| while way.asked.load(Ordering::Relaxed) < WINDOW && way.ask_more() {});
        Some(way)
    }

    /// Asks for one more expert's part; false if none is left.
    pub(super) fn ask_more(&self) -> bool {
        let Some(i) = self.asks.deal() else { return false };
        let (phase, place) = (i / self.active.len(), i % self.active.len());
        let expert = self.active[place] as usize;
        let (mut bytes, mut missing) = (0, false);
        each_span(self.matrices[phase], expert, |span| {
            bytes += span.len();
            missing |= self.ahead.ask(span);
        });
        if missing {
            self.missed[expert].fetch_or(1 << phase, Ordering::Relaxed);
            self.asked.fetch_add(bytes, Ordering::Relaxed);
        }
        true
    }

    /// Whether an expert was missing when it was asked for.
    pub(super) fn is_late(&self, expert: usize, phase: usize) -> bool {
        self.missed[expert].load(Ordering::Relaxed) & 1 << phase != 0
    }

    /// Waits for some rows of an expert's matrices; false if they cannot be had, and must not be touched.
    pub(super) fn wait(&self, phase: usize, expert: usize, first: usize, rows: usize) -> bool {
        if self.failed.get().is_some() {
            return false;
        }
        let late = self.is_late(expert, phase);
        // What makes room for missing experts may take one that was there.
        if !late && self.asked.load(Ordering::Relaxed) == 0 {
            return true;
        }
        self.matrices[phase].iter().all(|m| {
            let rows = m.span_of(expert, first, rows);
            if !late {
                if !self.ahead.ask_again(rows) {
                    return true;
                }
                self.missed[expert].fetch_or(1 << phase, Ordering::Relaxed);
            }
            match self.ahead.wait(rows) {
                Ok(()) => true,
                Err(error) => {
                    let _ = self.failed.set(error);
                    false
                }
            }
        })
    }

    /// Asks for all that is left, and waits for whole experts of a phase.
    ///
    /// # Errors
    /// If some weights cannot be had, now or before.
    pub(super) fn wait_for_all(&self, phase: usize, team: &dyn ParallelFor) -> Result<()> {
        while self.ask_more() {}
        let rows = self.matrices[phase].first().map_or(0, Matrix::rows);
        if self.asked.load(Ordering::Relaxed) > 0 {
            let dealer = Dealer::new(self.active.len());
            team.run(&|_| {
                while let Some(i) = dealer.deal() {
                    self.wait(phase, self.active[i] as usize, 0, rows);
                }
            });
        }
        match self.failed.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

impl Drop for Way<'_> {
    fn drop(&mut self) {
        let misses = self.active.iter().filter(|e| self.missed[**e as usize].load(Ordering::Relaxed) != 0).count();
        self.ahead.seen(self.active.len() - misses, misses);
        self.ahead.end(self.threads);
    }
}

/// Asks for the weights of some experts, gate and up of all of them before down, and does not wait.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] for an id that is no expert; then nothing is asked for.
pub fn prefetch(experts: &Experts<'_>, ids: &[i32], ahead: &dyn Ahead) -> Result<()> {
    let count = experts.up.matrix.experts();
    let known = |id: &i32| usize::try_from(*id).ok().filter(|e| *e < count);
    if let Some(bad) = ids.iter().find(|id| known(id).is_none()) {
        return Err(Error::invalid(format!("expert id {bad} is not one of {count}")));
    }
    if !ahead.begin() {
        return Ok(());
    }
    let up = experts.up.matrix;
    let first = [experts.gate.map_or(up, |gate| gate.matrix), up];
    let first = &first[usize::from(experts.gate.is_none())..];
    for matrices in [first, &[experts.down.matrix]] {
        for expert in ids.iter().filter_map(known) {
            each_span(matrices, expert, |span| {
                ahead.ask(span);
            });
        }
    }
    ahead.end(1);
    Ok(())
}

/// The weights of an expert in some matrices. Where one follows the other in memory, as gate and up in a merged tensor do, they are one.
fn each_span(matrices: &[Matrix<'_>], expert: usize, mut each: impl FnMut(Span)) {
    let mut last = None::<Span>;
    for matrix in matrices {
        let span = matrix.span_of(expert, 0, matrix.rows());
        last = match last {
            Some(before) => before.joined(span).or_else(|| {
                each(before);
                Some(span)
            }),
            None => Some(span),
        };
    }
    last.into_iter().for_each(each);
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::moe::WeightType;

    #[test]
    fn parts_of_a_merged_matrix_are_one_request_and_separate_ones_are_two() {
        let bytes = [0u8; 4 * 8 * 6 * 3 * 2];
        let (one, two) = bytes.split_at(bytes.len() / 2);
        let merged = Matrix::packed(one, WeightType::F32, [8, 6, 3]).unwrap();
        let seen = |matrices: &[Matrix<'_>], expert| {
            let mut seen = Vec::new();
            each_span(matrices, expert, |s| seen.push((s.start() - one.as_ptr().addr(), s.len())));
            seen
        };
        let halves = [merged.part(0, 3).unwrap(), merged.part(3, 3).unwrap()];
        assert_eq!(seen(&halves, 1), [(192, 192)]);
        assert_eq!(seen(&[halves[1], halves[0]], 1), [(192 + 96, 96), (192, 96)]);
        let other = Matrix::packed(two, WeightType::F32, [8, 6, 3]).unwrap();
        assert_eq!(seen(&[merged, other], 2), [(384, 192), (576 + 384, 192)]);
        assert_eq!(seen(&[], 0), []);
    }

    /// Misses every expert whose bytes begin at one of these addresses, and notes what it is told.
    struct Fake {
        missing: Vec<usize>,
        /// What is there at first and goes.
        gone: Option<usize>,
        lost: Option<usize>,
        told: Mutex<Vec<(char, usize)>>,
    }

    impl Ahead for Fake {
        fn begin(&self) -> bool {
            true
        }
        fn ask(&self, weights: Span) -> bool {
            self.told.lock().unwrap().push(('a', weights.start()));
            self.missing.contains(&weights.start())
        }
        fn ask_again(&self, weights: Span) -> bool {
            self.told.lock().unwrap().push(('g', weights.start()));
            self.gone == Some(weights.start())
        }
        fn seen(&self, hits: usize, misses: usize) {
            self.told.lock().unwrap().extend([('h', hits), ('m', misses)]);
        }
        fn wait(&self, weights: Span) -> Result<()> {
            self.told.lock().unwrap().push(('w', weights.start()));
            if self.lost == Some(weights.start()) { Err(Error::invalid("lost")) } else { Ok(()) }
        }
        fn end(&self, threads: usize) {
            self.told.lock().unwrap().push(('e', threads));
        }
    }

    #[test]
    fn the_first_phase_is_asked_for_before_the_second_and_only_what_is_missing_is_waited_for() {
        let bytes = [0u8; 4 * 2 * 4 * 2];
        let (a, b) = bytes.split_at(bytes.len() / 2);
        let [first, second] = [a, b].map(|m| Matrix::packed(m, WeightType::F32, [2, 1, 4]).unwrap());
        let (first, second) = ([first], [second]);
        let at = |m: &[u8], expert: usize| m.as_ptr().addr() + 8 * expert;
        let routing = Routing { starts: &[0, 1, 1, 2, 3], pairs: &[0, 1, 2], active: &[0, 2, 3], used: 3 };
        for (gone, lost) in [(None, None), (Some(at(b, 0)), None), (None, Some(at(b, 2)))] {
            let fake = Fake { missing: vec![at(a, 2), at(b, 2), at(b, 3)], gone, lost, told: Mutex::default() };
            let missed: Vec<AtomicU8> = (0..4).map(|_| AtomicU8::new(0)).collect();
            let way = Way::new(&fake, [&first, &second], &routing, &missed, &crate::moe::Serial).unwrap();
            assert_eq!([0, 2, 3].map(|e| way.is_late(e, FIRST)), [false, true, false]);
            assert!(way.wait(FIRST, 2, 0, 1) && way.wait(FIRST, 3, 0, 1));
            assert_eq!(way.wait_for_all(SECOND, &crate::moe::Serial).is_err(), lost.is_some());
            assert_eq!(way.wait(FIRST, 0, 0, 1), lost.is_none(), "after a loss nothing is touched");
            drop(way);
            let asked = [(a, 0), (a, 2), (a, 3), (b, 0), (b, 2), (b, 3)].map(|(m, e)| ('a', at(m, e)));
            let mut want = asked.to_vec();
            // What was there is looked at again, since room was made.
            want.extend([('w', at(a, 2)), ('g', at(a, 3)), ('g', at(b, 0))]);
            want.extend(gone.map(|at| ('w', at)));
            want.push(('w', at(b, 2)));
            want.extend(if lost.is_none() { vec![('w', at(b, 3)), ('g', at(a, 0))] } else { Vec::new() });
            let misses = 2 + usize::from(gone.is_some());
            want.extend([('h', 3 - misses), ('m', misses), ('e', 1)]);
            assert_eq!(*fake.told.lock().unwrap(), want);
        }
        // Nothing was missing: nothing is looked at twice.
        let fake = Fake { missing: Vec::new(), gone: Some(at(a, 0)), lost: None, told: Mutex::default() };
        let missed: Vec<AtomicU8> = (0..4).map(|_| AtomicU8::new(0)).collect();
        let way = Way::new(&fake, [&first, &second], &routing, &missed, &crate::moe::Serial).unwrap();
        assert!(way.wait(FIRST, 0, 0, 1) && way.wait_for_all(SECOND, &crate::moe::Serial).is_ok());
        drop(way);
        assert!(fake.told.lock().unwrap().iter().all(|(what, _)| !"gw".contains(*what)));
        assert!(Way::new(&Never, [&first, &second], &routing, &[], &crate::moe::Serial).is_none());
    }
}
