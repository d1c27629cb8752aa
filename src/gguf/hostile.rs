//! What the reader does with files that are wrong, and that what it accepts is what the module promises.
//!
//! Owns: the hostile cases, one test per promise. Must not know: how the reader is built.

use super::testing::{File, counts, string, tensor};
use super::{Error, ErrorKind as K, GgmlType, Header, Quirk, TextFault};

fn fault(bytes: &[u8]) -> K {
    Header::from_bytes(bytes).unwrap_err().kind
}

fn padded(mut header: Vec<u8>) -> Vec<u8> {
    header.resize(header.len().div_ceil(32) * 32 + 512, 0);
    header
}

/// A small header with every kind of field.
fn small() -> File {
    File::new(3)
        .str("general.architecture", "qwen3moe")
        .u32("qwen3moe.expert_count", 8)
        .strings("tokenizer.ggml.tokens", &["a", "bc", ""])
        .alignment(64)
        .tensor("token_embd.weight", &[32, 10], 8)
        .tensor("blk.0.ffn_gate_exps.weight", &[256, 4, 8], 12)
        .tensor("output.weight", &[32], 0)
}

/// Everything that the module's text promises about an accepted header.
fn check(header: &Header) {
    assert!(matches!(header.version(), 2 | 3));
    assert_eq!(header.data_offset() % u64::from(header.alignment()), 0);
    let mut spans: Vec<_> = Vec::new();
    for t in header.tensors() {
        assert_eq!(header.tensor(t.name), Some(t));
        assert!(!t.name.is_empty() && !t.name.chars().any(char::is_control));
        if let Some(info) = t.ty.info() {
            assert_eq!(t.bytes, t.dims.iter().product::<u64>() / info.block_elements * info.block_bytes);
        }
        if t.bytes > 0 {
            assert!(t.offset >= header.data_offset() && t.offset + t.bytes <= header.file_len(), "{t:?}");
            spans.push((t.offset, t.offset + t.bytes));
        }
    }
    spans.sort_unstable();
    assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0));
    let keys: std::collections::HashSet<_> = header.metadata().map(|(k, _)| k).collect();
    assert_eq!(keys.len(), header.metadata().len());
    for (key, value) in header.metadata() {
        assert_eq!(format!("{:?}", header.value(key).unwrap()), format!("{value:?}"));
        if let Some(elements) = value.as_array().and_then(|a| a.iter()) {
            assert_eq!(elements.count() as u64, value.as_array().unwrap().len);
        }
    }
}

#[test]
fn header_is_read_as_it_was_written_in_both_versions() {
    for version in [2, 3] {
        let file = File::new(version)
            .str("general.architecture", "qwen3moe")
            .u32("qwen3moe.expert_count", 8)
            .strings("tokens", &["a", "bc", ""])
            .pair("flag", 7, &[2])
            .pair("list", 9, &[&5u32.to_le_bytes()[..], &2u64.to_le_bytes(), &(-1i32).to_le_bytes(), &7i32.to_le_bytes()].concat())
            .tensor("a", &[32, 3], 8)
            .tensor("b", &[5, 7, 11, 13], 0)
            .tensor("scalar", &[], 0);
        let h = Header::from_bytes(&file.bytes()).unwrap();
        check(&h);
        assert_eq!((h.version(), h.alignment(), h.quirks().len()), (version, 32, 0));
        assert_eq!((h.str("general.architecture"), h.u64("qwen3moe.expert_count")), (Some("qwen3moe"), Some(8)));
        assert_eq!(h.value("flag"), Some(super::Value::Bool(true)));
        let tokens = h.value("tokens").unwrap().as_array().unwrap();
        assert_eq!(tokens.iter().unwrap().map(|v| v.as_str().unwrap()).collect::<Vec<_>>(), ["a", "bc", ""]);
        let list = h.value("list").unwrap().as_array().unwrap();
        assert_eq!(list.iter().unwrap().map(|v| v.as_u64()).collect::<Vec<_>>(), [None, Some(7)]);
        let [a, b, scalar] = h.tensors().collect::<Vec<_>>()[..] else { panic!() };
        assert_eq!((a.name, a.ty, a.dims, a.dim_count, a.bytes), ("a", GgmlType(8), [32, 3, 1, 1], 2, 102));
        assert_eq!((b.offset - a.offset, b.bytes, b.dims), (128, 4 * 5005, [5, 7, 11, 13]));
        assert_eq!((scalar.dim_count, scalar.bytes), (0, 4));
        assert_eq!(a.offset, h.data_offset());
    }
}

#[test]
fn file_truncated_at_any_byte_is_an_error_and_never_a_panic() {
    let whole = small().bytes();
    check(&Header::from_bytes(&whole).unwrap());
    let last = Header::from_bytes(&whole).unwrap().tensors().map(|t| t.offset + t.bytes).max().unwrap();
    for len in 0..last as usize {
        let e = Header::from_bytes(&whole[..len]).unwrap_err();
        assert!(matches!(e.kind, K::Truncated { .. } | K::Count { .. } | K::BeyondFile { .. }), "{len}: {e}");
    }
    Header::from_bytes(&whole[..last as usize]).unwrap();
}

#[test]
fn counts_and_lengths_up_to_2_64_are_refused_before_they_are_used() {
    for n in [1u64 << 63, u64::MAX, 1 << 62, (1 << 63) - 1, 1 << 40, 1 << 32] {
        assert!(matches!(fault(&padded(counts(3, n, 0))), K::Count { what: "tensors", .. }));
        assert!(matches!(fault(&padded(counts(3, 0, n))), K::Count { what: "metadata pairs", .. }));
        let length = n.to_le_bytes();
        assert!(matches!(fault(&padded([&counts(3, 0, 1)[..], &length].concat())), K::Truncated { .. }));
        assert!(matches!(fault(&padded([&counts(3, 1, 0)[..], &length].concat())), K::Truncated { .. }));
        let value = |ty: u32, rest: &[u8]| padded([&counts(3, 0, 1)[..], &string(b"k"), &ty.to_le_bytes(), rest].concat());
        assert!(matches!(fault(&value(8, &length)), K::Truncated { .. }));
        for element in [0u32, 5, 8, 10] {
            let k = fault(&value(9, &[&element.to_le_bytes()[..], &length].concat()));
            assert!(matches!(k, K::Truncated { .. }), "{k:?}");
        }
        let shape = padded([counts(3, 1, 0), tensor(b"t", &[32, n], 0, 0)].concat());
        assert!(matches!(fault(&shape), K::ShapeOverflow(_) | K::BeyondFile { .. }));
        let far = padded([counts(3, 1, 0), tensor(b"t", &[32], 0, n)].concat());
        assert!(matches!(fault(&far), K::BeyondFile { .. }));
    }
    let dims = padded([&counts(3, 1, 0)[..], &string(b"t"), &u32::MAX.to_le_bytes()].concat());
    assert!(matches!(fault(&dims), K::Dimensions { count: u32::MAX, .. }));
    assert!(matches!(fault(&File::new(3).raw_tensor(b"t", &[1 << 62, 1 << 62, 0], 0, 0).bytes()), K::ShapeOverflow(_)));
}

#[test]
fn wrong_magic_version_and_byte_order_are_told_apart() {
    assert_eq!(fault(b"GGML\0\0\0\0"), K::NotGguf(*b"GGML"));
    assert_eq!(fault(&counts(1, 0, 0)), K::Version(1));
    assert_eq!(fault(&counts(4, 0, 0)), K::Version(4));
    assert_eq!(fault(&counts(0, 0, 0)), K::Version(0));
    assert_eq!(fault(&counts(3u32.swap_bytes(), 0, 0)), K::BigEndian);
    assert!(matches!(fault(b""), K::Truncated { left: 0, .. }));
}

#[test]
fn unusable_names_are_refused_with_their_fault() {
    let long = vec![b'x'; 1025];
    for (name, why) in [
        (&b""[..], TextFault::Empty),
        (b"a\0b", TextFault::Control),
        (b"a\nb", TextFault::Control),
        (b"a\x1b[2Jb", TextFault::Control),
        ("a\u{85}b".as_bytes(), TextFault::Control),
        (b"a\xff\xfe", TextFault::NotUtf8),
        (&long, TextFault::TooLong { bytes: 1025, most: 1024 }),
    ] {
        let k = fault(&padded([counts(3, 1, 0), tensor(name, &[8], 0, 0)].concat()));
        assert!(matches!(&k, K::Text { what: "tensor name", fault, .. } if *fault == why), "{k:?}");
        if let TextFault::TooLong { .. } = why {
            assert_eq!(k.to_string(), "tensor name of 1025 bytes is too long; at most 1024 bytes are read");
        }
    }
    let key = padded([&counts(3, 0, 1)[..], &string(b"a\0"), &[0; 5]].concat());
    assert!(matches!(fault(&key), K::Text { what: "key", fault: TextFault::Control, .. }));
    let h = Header::from_bytes(&File::new(3).tensor("blk.0.größe.重み", &[8], 0).bytes()).unwrap();
    assert!(h.tensor("blk.0.größe.重み").is_some());
}

#[test]
fn duplicates_overlaps_and_tensors_beyond_the_file_are_refused_by_name() {
    let two = |a: &[u8], b: &[u8], off| padded([counts(3, 2, 0), tensor(a, &[16], 0, 0), tensor(b, &[16], 0, off)].concat());
    assert_eq!(fault(&two(b"t", b"t", 64)), K::DuplicateTensor("t".into()));
    let (first, second) = ("a".to_owned(), "b".to_owned());
    assert_eq!(fault(&two(b"a", b"b", 32)), K::Overlap { first: first.clone(), second: second.clone() });
    assert_eq!(fault(&two(b"a", b"b", 0)), K::Overlap { first, second });
    Header::from_bytes(&two(b"a", b"b", 64)).unwrap();
    assert!(matches!(fault(&two(b"a", b"b", 480)), K::BeyondFile { tensor, .. } if tensor == "b"));
    assert_eq!(fault(&File::new(3).u32("k", 1).str("k", "x").bytes()), K::DuplicateKey("k".into()));
}

#[test]
fn value_types_alignments_and_shapes_that_make_no_sense_are_refused() {
    assert!(matches!(fault(&File::new(3).pair("k", 13, &[0; 8]).bytes()), K::ValueType { number: 13, .. }));
    let nested = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[0; 20]].concat();
    assert!(matches!(fault(&File::new(3).pair("k", 9, &nested).bytes()), K::ValueType { number: 9, .. }));
    assert_eq!(fault(&File::new(3).u32("general.alignment", 0).bytes()), K::Alignment);
    assert_eq!(fault(&File::new(3).u16("general.alignment", 32).bytes()), K::Alignment);
    let one = |dims: &[u64], ty| padded([counts(3, 1, 0), tensor(b"t", dims, ty, 0)].concat());
    assert_eq!(fault(&one(&[33], 2)), K::PartialBlock { tensor: "t".into(), row: 33, block: 32 });
    assert_eq!(fault(&one(&[32], 4)), K::RemovedType { tensor: "t".into(), number: 4 });
    assert_eq!(fault(&one(&[1 << 63], 0)), K::ShapeOverflow("t".into()));
    assert_eq!(fault(&one(&[1 << 62], 0)), K::ShapeOverflow("t".into()));
    assert_eq!(fault(&one(&[0, 1 << 63], 0)), K::ShapeOverflow("t".into()));
    check(&Header::from_bytes(&one(&[0, 1 << 62], 0)).unwrap());
}

#[test]
fn odd_and_big_alignments_are_honoured_and_noted_where_stock_would_refuse() {
    for (alignment, noted) in [(1, false), (8, false), (4096, false), (65536, false), (24, true), (33, true)] {
        let f = File::new(3).alignment(alignment).tensor("a", &[3], 0).tensor("b", &[5], 0);
        let h = Header::from_bytes(&f.bytes()).unwrap();
        check(&h);
        let [a, b] = h.tensors().collect::<Vec<_>>()[..] else { panic!() };
        assert_eq!(b.offset - a.offset, 12u64.div_ceil(alignment.into()) * u64::from(alignment));
        assert_eq!(h.quirks(), if noted { vec![Quirk::Alignment(alignment)] } else { vec![] });
    }
}

#[test]
fn layouts_that_only_stock_refuses_are_read_and_noted() {
    let long = "x".repeat(64);
    let f = padded([counts(3, 2, 0), tensor(long.as_bytes(), &[8], 0, 100), tensor(b"b", &[8], 0, 4)].concat());
    let h = Header::from_bytes(&f).unwrap();
    check(&h);
    assert_eq!(h.quirks(), [Quirk::LongName(long.clone()), Quirk::Misaligned(long.clone()), Quirk::NotContiguous(long)]);
}

#[test]
fn a_tensor_without_data_beyond_the_end_of_the_file_is_read_and_noted() {
    let of = |offset| {
        let f = padded([counts(3, 1, 0), tensor(b"none", &[0], 0, offset)].concat());
        Header::from_bytes(&f).unwrap().quirks().to_vec()
    };
    assert_eq!(of(0), []);
    // The file has 512 bytes of data.
    assert_eq!(of(512), [Quirk::NotContiguous("none".into())]);
    assert_eq!(of(544), [Quirk::EmptyBeyondFile("none".into()), Quirk::NotContiguous("none".into())]);
}

#[test]
fn unknown_format_takes_the_span_up_to_the_next_tensor() {
    let f = padded([counts(3, 3, 0), tensor(b"z", &[8], 139, 0), tensor(b"y", &[8], 0, 96), tensor(b"x", &[8], 200, 128)].concat());
    let h = Header::from_bytes(&f).unwrap();
    check(&h);
    assert_eq!((h.tensor("z").unwrap().bytes, h.tensor("y").unwrap().bytes), (96, 32));
    let x = h.tensor("x").unwrap();
    assert_eq!(x.offset + x.bytes, h.file_len());
    assert_eq!(h.quirks(), [Quirk::UnknownType { tensor: "z".into(), ty: GgmlType(139) }]);
    let same = padded([counts(3, 2, 0), tensor(b"z", &[8], 139, 0), tensor(b"y", &[8], 139, 0)].concat());
    assert!(matches!(fault(&same), K::Overlap { .. }));
}

#[test]
fn large_arrays_are_measured_and_not_kept() {
    let tokens: Vec<String> = (0..20_000).map(|i| format!("token{i}")).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let scores = [&6u32.to_le_bytes()[..], &20_000u64.to_le_bytes(), &[0; 80_000]].concat();
    let f = File::new(3).strings("tokens", &tokens).pair("scores", 9, &scores).u32("after", 7).tensor("t", &[8], 0);
    let h = Header::from_bytes(&f.bytes()).unwrap();
    check(&h);
    for key in ["tokens", "scores"] {
        let a = h.value(key).unwrap().as_array().unwrap();
        assert_eq!((a.len, a.iter().is_none()), (20_000, true));
    }
    assert_eq!(h.u64("after"), Some(7));
    assert!(h.kept.capacity() < 1000);
}

#[test]
fn random_damage_is_refused_or_still_keeps_every_promise() {
    let whole = small().bytes();
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut accepted = 0;
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..bytes.len().min(400));
            match rng.u8(..4) {
                0 => bytes[at] = rng.u8(..),
                1 => bytes[at] ^= 1 << rng.u8(..8),
                2 => bytes.truncate(at.max(1)),
                _ => bytes.splice(at..at, std::iter::repeat_n(rng.u8(..), rng.usize(..9))).for_each(drop),
            }
        }
        if let Ok(header) = std::panic::catch_unwind(|| Header::from_bytes(&bytes)).unwrap_or_else(|_| panic!("seed {seed}")) {
            check(&header);
            accepted += 1;
        }
    }
    assert!(accepted > 100, "seed {seed}: only {accepted} were accepted, the damage is too great to prove anything");
}

#[test]
fn random_files_are_read_as_they_were_written() {
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..300 {
        let mut f = File::new(rng.u32(2..4));
        if rng.bool() {
            f = f.alignment(rng.choice([1, 2, 8, 32, 64, 100, 4096]).unwrap());
        }
        let mut wanted = Vec::new();
        for i in 0..rng.usize(..40) {
            let info = rng.choice(GgmlType::known()).unwrap();
            let dims: Vec<u64> =
                (0..rng.usize(1..5)).map(|d| if d == 0 { info.block_elements * rng.u64(0..3) } else { rng.u64(0..4) }).collect();
            let name = format!("{}.{i}", rng.alphabetic());
            f = f.tensor(&name, &dims, info.number);
            wanted.push((name, dims, info.number));
        }
        let h = Header::from_bytes(&f.bytes()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        check(&h);
        assert!(h.quirks().iter().all(|q| matches!(q, Quirk::Alignment(100))), "seed {seed}: {:?}", h.quirks());
        for (t, (name, dims, ty)) in h.tensors().zip(&wanted) {
            assert_eq!((t.name, &t.dims[..dims.len()], t.ty.0), (name.as_str(), &dims[..], *ty), "seed {seed}");
        }
    }
}

#[test]
fn header_with_200_000_tensors_is_read_far_below_a_second_and_within_its_own_size() {
    let mut f = File::new(3);
    for i in 0..200_000u64 {
        f = f.raw_tensor(format!("blk.{}.ffn_gate_exps.{i}.weight", i % 97).as_bytes(), &[32], 0, i * 128);
    }
    f.data_bytes = Some(200_000 * 128);
    let bytes = f.bytes();
    let start = std::time::Instant::now();
    let h = Header::from_bytes(&bytes).unwrap();
    let took = start.elapsed();
    assert_eq!(h.tensor_count(), 200_000);
    assert!(h.kept.capacity() as u64 <= f.header().len() as u64 * 2 && h.kept.capacity() < 40 << 20);
    // An unoptimised build on a busy machine says nothing about time.
    assert!(cfg!(debug_assertions) || took.as_secs_f64() < 1.0, "{took:?}");
    println!("200,000 tensors, {} KiB of header: {took:?}", f.header().len() >> 10);
}

#[test]
fn errors_from_a_file_on_disk_name_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broken.gguf");
    std::fs::write(&path, b"GGUF\x03").unwrap();
    let e: Error = Header::open(&path).unwrap_err();
    assert_eq!(e.file.as_deref(), Some(path.as_path()));
    assert!(e.to_string().contains("broken.gguf: at byte 4: the file ends inside the version"), "{e}");
    assert_eq!(Header::open(&dir.path().join("none.gguf")).unwrap_err().file, Some(dir.path().join("none.gguf")));
}
