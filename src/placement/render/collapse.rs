//! Many tensors in few lines.
//!
//! Owns: how tensors that differ only in their layer become one line. Must not know: how a line is shown.

use std::collections::HashMap;

use crate::placement::Name;
use crate::placement::explain::{Explanation, Placed};

/// Tensors of one name and one fate, in several layers.
pub(super) struct Line<'a> {
    /// The first of them, for all that they share.
    pub(super) first: &'a Placed,
    /// The name, with the layers in brackets if there are several.
    pub(super) name: String,
    pub(super) count: usize,
    pub(super) bytes: u64,
}

/// The tensors of `e`, in the order in which the first of each line stands in the file.
pub(super) fn lines(e: &Explanation) -> Vec<Line<'_>> {
    let mut at: HashMap<_, usize> = HashMap::new();
    let mut groups: Vec<Vec<&Placed>> = Vec::new();
    for t in &e.tensors {
        let n = Name::new(&t.name);
        // A name without a layer stands for itself, and those of an encoder are not those of the decoder.
        let key = (n.prefix, n.base, n.suffix, n.layer.is_some(), &t.type_name, &t.place, t.memory, t.rule, t.reason);
        match at.get(&key) {
            Some(&i) => groups[i].push(t),
            None => {
                at.insert(key, groups.len());
                groups.push(vec![t]);
            }
        }
    }
    groups.into_iter().map(|g| Line { first: g[0], name: name(&g), count: g.len(), bytes: g.iter().map(|t| t.bytes).sum() }).collect()
}

fn name(group: &[&Placed]) -> String {
    let first = group[0];
    let layers: Vec<u32> = group.iter().filter_map(|t| t.layer).collect();
    match (first.layer, group.len()) {
        (Some(layer), 2..) => {
            // The number stands between the first two dots behind the prefix.
            first.name.replacen(&format!(".{layer}."), &format!(".[{}].", ranges(layers)), 1)
        }
        _ => first.name.clone(),
    }
}

/// `0-5,7`.
fn ranges(mut numbers: Vec<u32>) -> String {
    numbers.sort_unstable();
    numbers.dedup();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for n in numbers {
        match runs.last_mut() {
            Some((_, to)) if n == *to + 1 => *to = n,
            _ => runs.push((n, n)),
        }
    }
    let text = |(from, to): (u32, u32)| if from == to { from.to_string() } else { format!("{from}-{to}") };
    runs.into_iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_become_ranges() {
        assert_eq!(ranges(vec![3, 1, 2, 7, 9, 8, 2]), "1-3,7-9");
        assert_eq!(ranges(vec![5]), "5");
    }

    #[test]
    fn layers_of_an_encoder_and_of_a_decoder_are_lines_of_their_own() {
        use crate::gguf::Header;
        use crate::gguf::testing::File;
        use crate::placement::{Explanation, Facts, Machine, Rules, Targets};

        let mut file = File::new(3).str("general.architecture", "t5").u32("t5.block_count", 2);
        for prefix in ["enc.blk", "dec.blk"] {
            for layer in 0..2 {
                file = file.tensor(&format!("{prefix}.{layer}.attn_q.weight"), &[32, 2], 0);
            }
        }
        let header = Header::from_bytes(&file.bytes()).unwrap();
        let rules = Rules::new(Targets::new([""; 0]));
        let e = Explanation::of_header(&header, &rules, &Facts::of(&header).load(), Machine::default()).unwrap();
        let seen: Vec<_> = lines(&e).iter().map(|l| (l.name.clone(), l.count)).collect();
        assert_eq!(seen, [("enc.blk.[0-1].attn_q.weight".to_owned(), 2), ("dec.blk.[0-1].attn_q.weight".to_owned(), 2)]);
    }
}
