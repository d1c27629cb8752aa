//! Which token rows each expert gets.
//!
//! Owns: the check of the ids, and the counting sort of (token, choice) pairs by expert. Pairs of one expert keep their order, so that the
//! result does not depend on anything but the ids. Must not know: weights, threads. Never writes outside its own tables.

use super::args::Table;
use crate::error::{Error, Result};

/// Pairs sorted by expert. A pair is `token * used + choice`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routing<'a> {
    /// `pairs[starts[e]..starts[e + 1]]` are the pairs of expert `e`.
    pub(super) starts: &'a [u32],
    /// All pairs.
    pub(super) pairs: &'a [u32],
    /// Experts that have pairs; most pairs first, then by number.
    pub(super) active: &'a [u32],
    /// Choices per token.
    pub(super) used: usize,
}

impl Routing<'_> {
    /// Pairs of one expert.
    pub(super) fn count(&self, expert: usize) -> usize {
        (self.starts[expert + 1] - self.starts[expert]) as usize
    }
}

/// Checks all ids, then sorts. `starts` has one more entry than there are experts, `active` has as many, `pairs` one per id.
///
/// # Errors
/// [`crate::error::Status::InvalidArgument`] for the first id that is below 0 or not below the number of experts.
pub(super) fn route<'a>(ids: &Table<'_, i32>, starts: &'a mut [u32], pairs: &'a mut [u32], active: &'a mut [u32]) -> Result<Routing<'a>> {
    let experts = active.len();
    let (used, tokens) = (ids.used(), ids.tokens());
    starts.fill(0);
    for token in 0..tokens {
        for j in 0..used {
            let id = ids.get(token, j);
            match usize::try_from(id) {
                Ok(expert) if expert < experts => starts[expert + 1] += 1,
                _ => return Err(Error::invalid(format!("token {token}: expert id {id} at choice {j} is not one of {experts}"))),
            }
        }
    }
    let mut busy = 0;
    for expert in 0..experts {
        if starts[expert + 1] > 0 {
            active[busy] = expert as u32;
            busy += 1;
        }
        starts[expert + 1] += starts[expert];
    }
    // `starts[e]` is used as the place of the next pair of `e`; at the end it has become `starts[e + 1]`, and is shifted back.
    for token in 0..tokens {
        for j in 0..used {
            // The ids may have changed since they were checked, in a host with a defect; an index check is then better than a wild write.
            let place = &mut starts[ids.get(token, j) as usize];
            pairs[*place as usize] = (token * used + j) as u32;
            *place += 1;
        }
    }
    starts.copy_within(0..experts, 1);
    starts[0] = 0;
    let starts = &*starts;
    let active = &mut active[..busy];
    active.sort_unstable_by_key(|e| (std::cmp::Reverse(starts[*e as usize + 1] - starts[*e as usize]), *e));
    Ok(Routing { starts, pairs, active, used })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed(ids: &[i32], used: usize, experts: usize) -> Result<(Vec<u32>, Vec<u32>, Vec<u32>)> {
        let (mut starts, mut pairs, mut active) = (vec![9; experts + 1], vec![9; ids.len()], vec![9; experts]);
        let table = Table::packed(ids, used, ids.len() / used).unwrap();
        let r = route(&table, &mut starts, &mut pairs, &mut active)?;
        Ok((r.starts.to_vec(), r.pairs.to_vec(), r.active.to_vec()))
    }

    #[test]
    fn pairs_are_grouped_by_expert_in_their_order() {
        let (starts, pairs, active) = routed(&[3, 0, 3, 3, 1, 0], 2, 5).unwrap();
        assert_eq!(starts, [0, 2, 3, 3, 6, 6]);
        assert_eq!(pairs, [1, 5, 4, 0, 2, 3]);
        assert_eq!(active, [3, 0, 1]);
        assert_eq!(routed(&[], 2, 2).unwrap(), (vec![0, 0, 0], vec![], vec![]));
    }

    #[test]
    fn ids_out_of_range_are_refused() {
        for bad in [-1, 5, i32::MIN, i32::MAX] {
            let error = routed(&[0, 1, 2, bad], 2, 5).unwrap_err();
            assert!(error.message.contains("token 1") && error.message.contains(&bad.to_string()), "{error}");
        }
    }

    #[test]
    fn strided_ids_are_read_where_they_are() {
        let ids = [1, 0, -7, 0, 1, -7];
        let table = Table::strided(&ids, 2, 2, 3).unwrap();
        let (mut starts, mut pairs, mut active) = ([0; 3], [0; 4], [0; 2]);
        let r = route(&table, &mut starts, &mut pairs, &mut active).unwrap();
        assert_eq!((r.pairs, r.active), (&[1, 2, 0, 3][..], &[0, 1][..]));
    }
}
