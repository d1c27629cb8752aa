//! Bringing weights into memory before they are read, as the operation sees it.
//!
//! Owns: the interface [`Ahead`], and the way through the weights of one call: everything that a phase needs is asked for at once, by all
//! threads, gate and up before down; what is there already is computed first. Must not know: pages, files, when it is worth a look.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

use super::Experts;
use super::args::{Matrix, WeightRows};
use super::pool::ParallelFor;
use super::route::Routing;
use super::schedule::Dealer;
use super::span::Span;
use crate::error::{Error, Result};

/// Most bytes that are asked for before the first product. What a batch needs beyond is asked for while it is computed, so that it does not
/// push out what came first.
const WINDOW: usize = 256 << 20;

/// Where bytes are that somebody was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// In memory, all of them.
    There,
    /// On their way to where they belong, so that [`Ahead::wait`] is needed.
    Coming,
    /// On their way to this address instead, so that [`Ahead::wait_for_copy`] is needed.
    Copy(NonNull<u8>),
}

/// Who brings weights into memory.
///
/// # Safety
/// The address of a [`Asked::Copy`] must have as many bytes as were asked for, which are initialised and, once [`Ahead::wait_for_copy`] has returned
/// without an error, what was asked for; nobody may write to them from then on until [`Ahead::end`].
pub unsafe trait Ahead: Sync {
    /// A call begins. Whether weights have to be asked for at all.
    fn begin(&self) -> bool;
    /// Asks for these bytes, without waiting. Whether some were missing, so that [`Ahead::wait`] is needed.
    fn ask(&self, weights: Span) -> bool;
    /// As [`Ahead::ask`], for all bytes of an expert in one matrix or two, which may come to another place.
    fn bring(&self, weights: Span) -> Asked {
        if self.ask(weights) { Asked::Coming } else { Asked::There }
    }
    /// Looks again at bytes that were all there, and asks for what has gone since. Whether some have.
    fn ask_again(&self, weights: Span) -> bool;
    /// How many experts of the call had all their weights in memory, and how many had not.
    fn seen(&self, hits: usize, misses: usize);
    /// Waits for bytes that were asked for.
    ///
    /// # Errors
    /// If they cannot be had.
    fn wait(&self, weights: Span) -> Result<()>;
    /// Waits for bytes in another place: a part of a [`Asked::Copy`].
    ///
    /// # Errors
    /// If they cannot be had.
    fn wait_for_copy(&self, _copy: Span) -> Result<()> {
        Ok(())
    }
    /// A call that was begun with "yes" is over; it had this many threads.
    fn end(&self, threads: usize);
}

/// Nobody does: memory is memory.
#[derive(Clone, Copy, Debug)]
pub struct Never;

// SAFETY: there are no copies.
unsafe impl Ahead for Never {
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
    /// By matrix and expert: where the weights are, if it is not where they belong. Set before anybody waits.
    copies: &'a [AtomicPtr<u8>],
    threads: usize,
    /// First matrices of all active experts, then the second ones.
    asks: Dealer,
    /// Bytes for which others have to make room.
    asked: AtomicUsize,
    /// Bytes that come to another place.
    copied: AtomicUsize,
    failed: OnceLock<Error>,
}

impl<'a> Way<'a> {
    /// Asks for what the call needs, up to a window. `None` if nothing has to be asked for. `missed` has a zero for each expert, `copies` for each
    /// expert of each matrix.
    pub(super) fn new(
        ahead: &'a dyn Ahead,
        matrices: [&'a [Matrix<'a>]; 2],
        routing: &Routing<'a>,
        (missed, copies): (&'a [AtomicU8], &'a [AtomicPtr<u8>]),
        team: &dyn ParallelFor,
    ) -> Option<Way<'a>> {
        if !ahead.begin() {
            return None;
        }
        let (active, threads) = (routing.active, team.threads());
        let phases = if matrices[SECOND].is_empty() { 1 } else { 2 };
        let asks = Dealer::new(phases * active.len());
        let (asked, copied, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), OnceLock::new());
        let way = Way { ahead, matrices, active, missed, copies, threads, asks, asked, copied, failed };
        team.run(&|_| while way.bytes() < WINDOW && way.ask(true) {});
        Some(way)
    }

    /// Bytes that were asked for.
    fn bytes(&self) -> usize {
        self.asked.load(Ordering::Relaxed) + self.copied.load(Ordering::Relaxed)
    }

    /// Asks for one more expert's part; false if none is left.
    pub(super) fn ask_more(&self) -> bool {
        // Others compute already: for them weights must not be in another place from now on.
        self.ask(false)
    }

    fn ask(&self, may_copy: bool) -> bool {
        let Some(i) = self.asks.deal() else { return false };
        let (phase, place) = (i / self.active.len(), i % self.active.len());
        let expert = self.active[place] as usize;
        each_span(self.matrices[phase], expert, |span, which| {
            let asked = match may_copy {
                true => self.ahead.bring(span),
                false if self.ahead.ask(span) => Asked::Coming,
                false => Asked::There,
            };
            match asked {
                Asked::There => return,
                Asked::Coming => self.asked.fetch_add(span.len(), Ordering::Relaxed),
                Asked::Copy(copy) => {
                    for i in which {
                        let matrix = self.matrices[phase][i];
                        let into = matrix.span_of(expert, 0, matrix.rows()).start() - span.start();
                        self.copy(phase, i, expert).store(copy.as_ptr().wrapping_add(into), Ordering::Relaxed);
                    }
                    self.copied.fetch_add(span.len(), Ordering::Relaxed)
                }
            };
            self.missed[expert].fetch_or(1 << phase, Ordering::Relaxed);
        });
        true
    }

    /// Where an expert's weights in one matrix are instead; NULL if they are where they belong.
    fn copy(&self, phase: usize, which: usize, expert: usize) -> &AtomicPtr<u8> {
        let matrix = if phase == FIRST { which } else { self.matrices[FIRST].len() + which };
        &self.copies[matrix * self.missed.len() + expert]
    }

    /// Some rows of an expert in one of a phase's matrices, wherever they are. Who reads them must have waited for them.
    pub(super) fn rows(&self, phase: usize, which: usize, expert: usize, first: usize, rows: usize) -> WeightRows<'_> {
        let matrix = &self.matrices[phase][which];
        match NonNull::new(self.copy(phase, which, expert).load(Ordering::Relaxed)) {
            None => matrix.slice(expert, first, rows),
            // SAFETY: the copy has all bytes of the expert in this matrix, by the promise of `Ahead`; it stays as long as this way does, and who asks
            // has waited.
            Some(copy) => unsafe { matrix.slice_of_copy(copy, first, rows) },
        }
    }

    /// Where a row of an expert begins, or will begin: to be prefetched, not to be read.
    pub(super) fn first_byte(&self, phase: usize, which: usize, expert: usize, first: usize) -> *const u8 {
        let row = |first| self.matrices[phase][which].slice(expert, first, 1).start();
        let copy = self.copy(phase, which, expert).load(Ordering::Relaxed);
        if copy.is_null() { row(first) } else { copy.wrapping_add(row(first).addr() - row(0).addr()) }
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
        self.matrices[phase].iter().enumerate().all(|(i, m)| {
            let span = m.span_of(expert, first, rows);
            let copy = self.copy(phase, i, expert).load(Ordering::Relaxed);
            let waited = if !copy.is_null() {
                let into = span.start() - m.span_of(expert, 0, m.rows()).start();
                Span::of(copy.wrapping_add(into), span.len()).map_or(Ok(()), |copy| self.ahead.wait_for_copy(copy))
            } else if late {
                self.ahead.wait(span)
            } else if self.ahead.ask_again(span) {
                self.missed[expert].fetch_or(1 << phase, Ordering::Relaxed);
                self.ahead.wait(span)
            } else {
                Ok(())
            };
            match waited {
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
        if self.bytes() > 0 {
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
            // Nobody waits: they come to where they belong.
            each_span(matrices, expert, |span, _| {
                ahead.ask(span);
            });
        }
    }
    ahead.end(1);
    Ok(())
}

/// The weights of an expert in some matrices, and in which. Where one follows the other in memory, as gate and up in a merged tensor do, they are one.
fn each_span(matrices: &[Matrix<'_>], expert: usize, mut each: impl FnMut(Span, Range<usize>)) {
    let mut last = None::<(Span, Range<usize>)>;
    for (i, matrix) in matrices.iter().enumerate() {
        let span = matrix.span_of(expert, 0, matrix.rows());
        let joined = last.as_ref().and_then(|(before, which)| Some((before.joined(span)?, which.start..i + 1)));
        match joined {
            Some(joined) => last = Some(joined),
            None => last.replace((span, i..i + 1)).into_iter().for_each(|(span, which)| each(span, which)),
        }
    }
    last.into_iter().for_each(|(span, which)| each(span, which));
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
            each_span(matrices, expert, |s, which| seen.push((s.start() - one.as_ptr().addr(), s.len(), which)));
            seen
        };
        let halves = [merged.part(0, 3).unwrap(), merged.part(3, 3).unwrap()];
        assert_eq!(seen(&halves, 1), [(192, 192, 0..2)]);
        assert_eq!(seen(&[halves[1], halves[0]], 1), [(192 + 96, 96, 0..1), (192, 96, 1..2)]);
        let other = Matrix::packed(two, WeightType::F32, [8, 6, 3]).unwrap();
        assert_eq!(seen(&[merged, other], 2), [(384, 192, 0..1), (576 + 384, 192, 1..2)]);
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

    // SAFETY: there are no copies.
    unsafe impl Ahead for Fake {
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

    /// For experts of which nothing is missing, in this many matrices.
    fn nothing(experts: usize, matrices: usize) -> (Vec<AtomicU8>, Vec<AtomicPtr<u8>>) {
        (std::iter::repeat_with(AtomicU8::default).take(experts).collect(), (0..experts * matrices).map(|_| AtomicPtr::default()).collect())
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
            let (missed, copies) = nothing(4, 2);
            let way = Way::new(&fake, [&first, &second], &routing, (&missed, &copies), &crate::moe::Serial).unwrap();
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
        let (missed, copies) = nothing(4, 2);
        let way = Way::new(&fake, [&first, &second], &routing, (&missed, &copies), &crate::moe::Serial).unwrap();
        assert!(way.wait(FIRST, 0, 0, 1) && way.wait_for_all(SECOND, &crate::moe::Serial).is_ok());
        drop(way);
        assert!(fake.told.lock().unwrap().iter().all(|(what, _)| !"gw".contains(*what)));
        assert!(Way::new(&Never, [&first, &second], &routing, (&[], &[]), &crate::moe::Serial).is_none());
    }
}
