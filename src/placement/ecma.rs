//! The grammar of stock's patterns, translated for an engine with bounded time.
//!
//! Owns: which patterns `std::regex` (ECMAScript grammar, as in libstdc++) accepts, and what each part of one means. Must not know: rules,
//! targets, which engine runs the result.
//!
//! Stock hands a pattern to `std::regex` and calls `regex_search` on the bytes of a tensor name. That is not JavaScript's grammar:
//! `a**` and `[[:digit:]]` are fine, `{` is never a literal, `\cA` is the letter `A`, a back-reference to a group without a match fails.
//! So the translation follows libstdc++ (read: `bits/regex_scanner.tcc`, `bits/regex_compiler.tcc` of GCC 12) and is compared with it on
//! 100,000 random patterns by `ffi-tests/tests/pattern_semantics.rs`.
//!
//! The result is in the syntax of the `regex` family, byte-wise, with nothing left to that syntax's own defaults: every byte and every class
//! is written out.

use std::fmt::Write;

use super::byte_set::ByteSet;
use super::pattern_error::{PatternError, PatternFault};

/// A pattern is at most this long. libstdc++ recurses once per element and would overflow the stack of its host at some length.
pub const MAX_PATTERN_BYTES: usize = 4096;

/// Groups, look-aheads and quantifiers on quantifiers nest at most this deep.
const MAX_DEPTH: usize = 40;

/// A pattern compiles to at most about this many states. libstdc++ gives up at 100,000.
const MAX_COST: u64 = 10_000;

/// A translated pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Translation {
    /// The pattern in the syntax of the `regex` family.
    pub(super) text: String,
    /// Whether it needs an engine that backtracks.
    pub(super) backtracks: bool,
    /// About how many states it has.
    pub(super) cost: u64,
}

/// Translates a pattern, or says where and why not.
pub(super) fn translate(pattern: &str) -> Result<Translation, PatternError> {
    let error = |at, fault| Err(PatternError { at, fault });
    if pattern.is_empty() {
        return error(0, PatternFault::Empty);
    }
    if pattern.len() > MAX_PATTERN_BYTES {
        return error(MAX_PATTERN_BYTES, PatternFault::TooLong);
    }
    if let Some(at) = pattern.find('\0') {
        return error(at, PatternFault::Nul);
    }
    let mut t =
        Translator { pattern: pattern.as_bytes(), at: 0, out: String::new(), open: Vec::new(), groups: 0, look_at: None, back_at: None };
    let cost = t.disjunction(0, false)?;
    if t.at < t.pattern.len() {
        let fault = if t.pattern[t.at] == b')' { PatternFault::UnopenedGroup } else { PatternFault::NothingToRepeat };
        return error(t.at, fault);
    }
    if let (Some(look), Some(back)) = (t.look_at, t.back_at) {
        return error(look.max(back), PatternFault::BackReferenceAndLookAhead);
    }
    Ok(Translation { text: t.out, backtracks: t.look_at.is_some() || t.back_at.is_some(), cost })
}

struct Translator<'a> {
    pattern: &'a [u8],
    at: usize,
    out: String,
    /// Numbers of the capturing groups that are not closed yet.
    open: Vec<usize>,
    groups: usize,
    /// Where the first look-ahead and the first back-reference stand.
    look_at: Option<usize>,
    back_at: Option<usize>,
}

type Cost = Result<u64, PatternError>;

impl Translator<'_> {
    fn peek(&self) -> Option<u8> {
        self.pattern.get(self.at).copied()
    }

    fn peek_at(&self, ahead: usize) -> Option<u8> {
        self.pattern.get(self.at + ahead).copied()
    }

    fn eat(&mut self, byte: u8) -> bool {
        let hit = self.peek() == Some(byte);
        self.at += usize::from(hit);
        hit
    }

    fn fail<T>(&self, at: usize, fault: PatternFault) -> Result<T, PatternError> {
        Err(PatternError { at, fault })
    }

    fn disjunction(&mut self, depth: usize, in_look: bool) -> Cost {
        if depth > MAX_DEPTH {
            return self.fail(self.at, PatternFault::TooDeep);
        }
        let from = self.at;
        let mut cost = 1;
        loop {
            while let Some(term) = self.term(depth, in_look)? {
                cost += term;
                if cost > MAX_COST {
                    return self.fail(from, PatternFault::TooLarge);
                }
            }
            if !self.eat(b'|') {
                return Ok(cost);
            }
            self.out.push('|');
        }
    }

    /// One assertion, or one atom with its quantifiers; `None` before `|`, `)`, the end, or something that cannot start a term.
    fn term(&mut self, depth: usize, in_look: bool) -> Result<Option<u64>, PatternError> {
        let start = self.at;
        let assertion = match (self.peek(), self.peek_at(1), self.peek_at(2)) {
            (Some(b'^'), ..) => r"\A",
            (Some(b'$'), ..) => r"\z",
            (Some(b'\\'), Some(b'b'), _) => r"\b",
            (Some(b'\\'), Some(b'B'), _) => r"\B",
            (Some(b'('), Some(b'?'), Some(sign @ (b'=' | b'!'))) => {
                self.look_at.get_or_insert(start);
                self.at += 3;
                self.out.push_str(if sign == b'=' { "(?=" } else { "(?!" });
                let cost = self.disjunction(depth + 1, true)?;
                self.close(start)?;
                return Ok(Some(cost + 1));
            }
            _ => return self.atom(depth, in_look),
        };
        if in_look && assertion != r"\z" {
            return self.fail(start, PatternFault::AssertionInLookAhead);
        }
        self.at += if assertion.starts_with(r"\A") || assertion == r"\z" { 1 } else { 2 };
        self.out.push_str(assertion);
        Ok(Some(1))
    }

    fn close(&mut self, start: usize) -> Result<(), PatternError> {
        match self.peek() {
            Some(b')') => {
                self.at += 1;
                self.out.push(')');
                Ok(())
            }
            None => self.fail(start, PatternFault::UnclosedGroup),
            Some(_) => self.fail(self.at, PatternFault::NothingToRepeat),
        }
    }

    fn atom(&mut self, depth: usize, in_look: bool) -> Result<Option<u64>, PatternError> {
        let (start, out_start) = (self.at, self.out.len());
        let Some(byte) = self.peek() else { return Ok(None) };
        let cost = match byte {
            b'*' | b'+' | b'?' | b'{' | b'|' | b')' => return Ok(None),
            b'(' => self.group(depth, in_look)?,
            b'[' => self.bracket()?,
            b'\\' => self.escape()?,
            b'.' => {
                self.at += 1;
                self.class(&ByteSet::of(|b| b != b'\n' && b != b'\r'))
            }
            literal => {
                self.at += 1;
                self.literal(literal)
            }
        };
        self.quantifiers(start, out_start, depth, cost).map(Some)
    }

    fn group(&mut self, depth: usize, in_look: bool) -> Cost {
        let start = self.at;
        self.at += 1;
        if self.eat(b'?') {
            if !self.eat(b':') {
                return self.fail(start, PatternFault::UnknownGroup);
            }
            self.out.push_str("(?:");
            let cost = self.disjunction(depth + 1, in_look)?;
            self.close(start)?;
            return Ok(cost + 1);
        }
        self.groups += 1;
        self.open.push(self.groups);
        self.out.push('(');
        let cost = self.disjunction(depth + 1, in_look)?;
        self.close(start)?;
        self.open.pop();
        Ok(cost + 2)
    }

    fn quantifiers(&mut self, start: usize, out_start: usize, depth: usize, mut cost: u64) -> Cost {
        let mut count = 0;
        loop {
            let at = self.at;
            let (min, max) = match self.peek() {
                Some(b'*') => (0, None),
                Some(b'+') => (1, None),
                Some(b'?') => (0, Some(1)),
                Some(b'{') => self.braces()?,
                _ => return Ok(cost),
            };
            if self.pattern[at] != b'{' {
                self.at += 1;
            }
            count += 1;
            if depth + count > MAX_DEPTH {
                return self.fail(at, PatternFault::TooDeep);
            }
            cost = cost.saturating_mul(max.unwrap_or(min + 1).max(1)).saturating_add(1);
            if cost > MAX_COST {
                return self.fail(start, PatternFault::TooLarge);
            }
            // The atom may consist of several parts, and a second quantifier applies to the first one's result.
            // `fancy-regex` does not repeat what is empty or only looks ahead, hence the zero bytes in front of a group.
            self.out.insert_str(out_start, if self.pattern[start] == b'(' { r"(?:\x00{0}" } else { "(?:" });
            let lazy = if self.eat(b'?') { "?" } else { "" };
            let written = match (min, max) {
                (0, None) => write!(self.out, ")*{lazy}"),
                (1, None) => write!(self.out, ")+{lazy}"),
                (0, Some(1)) => write!(self.out, ")?{lazy}"),
                (min, None) => write!(self.out, "){{{min},}}{lazy}"),
                (min, Some(max)) => write!(self.out, "){{{min},{max}}}{lazy}"),
            };
            debug_assert!(written.is_ok(), "writing to a String cannot fail");
        }
    }

    fn braces(&mut self) -> Result<(u64, Option<u64>), PatternError> {
        let start = self.at;
        self.at += 1;
        let bad = PatternError { at: start, fault: PatternFault::BadBraces };
        let min = self.number(start)?.ok_or(bad)?;
        let max = if self.eat(b',') { self.number(start)? } else { Some(min) };
        if !self.eat(b'}') || max.is_some_and(|max| max < min) { Err(bad) } else { Ok((min, max)) }
    }

    fn number(&mut self, start: usize) -> Result<Option<u64>, PatternError> {
        let mut n = None;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            let next = n.unwrap_or(0) * 10 + u64::from(digit - b'0');
            if next > MAX_COST {
                return self.fail(start, PatternFault::TooLarge);
            }
            n = Some(next);
            self.at += 1;
        }
        Ok(n)
    }

    fn escape(&mut self) -> Cost {
        let start = self.at;
        match self.escaped()? {
            Escaped::Byte(byte) => Ok(self.literal(byte)),
            Escaped::Class(set) => Ok(self.class(&set)),
            Escaped::BackReference(n) if n >= 1 && n <= self.groups && !self.open.contains(&n) => {
                self.back_at.get_or_insert(start);
                let written = write!(self.out, r"(?:\{n})");
                debug_assert!(written.is_ok(), "writing to a String cannot fail");
                Ok(1)
            }
            Escaped::BackReference(_) => self.fail(start, PatternFault::BadBackReference),
            // Outside of brackets an assertion, which `term` has taken.
            Escaped::Boundary => self.fail(start, PatternFault::BadEscape),
        }
    }

    /// Reads an escape, in or outside of brackets (where `\b` is handled by the callers).
    fn escaped(&mut self) -> Result<Escaped, PatternError> {
        let start = self.at;
        let Some(byte) = self.peek_at(1) else { return self.fail(start, PatternFault::BadEscape) };
        self.at += 2;
        Ok(match byte {
            b'0' => Escaped::Byte(0),
            b'f' => Escaped::Byte(0x0c),
            b'n' => Escaped::Byte(b'\n'),
            b'r' => Escaped::Byte(b'\r'),
            b't' => Escaped::Byte(b'\t'),
            b'v' => Escaped::Byte(0x0b),
            b'B' => Escaped::Boundary,
            b'd' | b'D' | b's' | b'S' | b'w' | b'W' => {
                let set = ByteSet::named(&[byte]).unwrap_or_default();
                Escaped::Class(if byte.is_ascii_uppercase() { set.complement() } else { set })
            }
            // Not a control character: libstdc++ takes the letter itself.
            b'c' => match self.peek() {
                Some(letter) => {
                    self.at += 1;
                    Escaped::Byte(letter)
                }
                None => return self.fail(start, PatternFault::BadEscape),
            },
            b'x' | b'u' => {
                let digits = if byte == b'x' { 2 } else { 4 };
                let text = self.pattern.get(self.at..self.at + digits).filter(|d| d.iter().all(u8::is_ascii_hexdigit));
                let value = text.and_then(|d| std::str::from_utf8(d).ok()).and_then(|d| u32::from_str_radix(d, 16).ok());
                self.at += digits;
                match value.map(u8::try_from) {
                    Some(Ok(byte)) => Escaped::Byte(byte),
                    Some(Err(_)) => return self.fail(start, PatternFault::WideEscape),
                    None => return self.fail(start, PatternFault::BadEscape),
                }
            }
            b'1'..=b'9' => {
                let mut n = usize::from(byte - b'0');
                while let Some(digit @ b'0'..=b'9') = self.peek() {
                    n = n.saturating_mul(10).saturating_add(usize::from(digit - b'0'));
                    self.at += 1;
                }
                Escaped::BackReference(n)
            }
            other => Escaped::Byte(other),
        })
    }

    fn bracket(&mut self) -> Cost {
        let start = self.at;
        self.at += 1;
        let negated = self.eat(b'^');
        let mut set = ByteSet::default();
        let mut last = Last::Nothing;
        let mut first = true;
        loop {
            let at = self.at;
            match self.bracket_item(start)? {
                Item::End => break,
                Item::Byte(byte) => last.push(&mut set, Last::Byte(byte)),
                Item::Class(more) => {
                    last.push(&mut set, Last::Class);
                    set.add_all(&more);
                }
                Item::Dash if first => last = Last::Byte(b'-'),
                Item::Dash => {
                    let after = self.bracket_item(start)?;
                    match (last, after) {
                        (_, Item::End) => {
                            last.push(&mut set, Last::Byte(b'-'));
                            break;
                        }
                        (Last::Byte(from), Item::Byte(to)) => last = self.range(at, &mut set, from, to)?,
                        (Last::Byte(from), Item::Dash) => last = self.range(at, &mut set, from, b'-')?,
                        (Last::Nothing, _) => {
                            last = Last::Byte(b'-');
                            self.at = at + 1;
                        }
                        _ => return self.fail(at, PatternFault::BadRange),
                    }
                }
            }
            first = false;
        }
        last.push(&mut set, Last::Nothing);
        Ok(self.class(&if negated { set.complement() } else { set }))
    }

    fn range(&self, at: usize, set: &mut ByteSet, from: u8, to: u8) -> Result<Last, PatternError> {
        if !from.is_ascii() || !to.is_ascii() {
            return self.fail(at, PatternFault::WideRange);
        }
        if from > to {
            return self.fail(at, PatternFault::BadRange);
        }
        (from..=to).for_each(|b| set.add(b));
        Ok(Last::Nothing)
    }

    fn bracket_item(&mut self, start: usize) -> Result<Item, PatternError> {
        let at = self.at;
        let Some(byte) = self.peek() else { return self.fail(start, PatternFault::UnclosedClass) };
        match byte {
            b']' => {
                self.at += 1;
                Ok(Item::End)
            }
            b'-' => {
                self.at += 1;
                Ok(Item::Dash)
            }
            b'[' => match self.peek_at(1) {
                Some(kind @ (b':' | b'.' | b'=')) => {
                    let name = &self.pattern[at + 2..];
                    let end = name.iter().position(|&b| b == kind).filter(|&end| name.get(end + 1) == Some(&b']'));
                    let Some(end) = end else { return self.fail(at, PatternFault::BadClass) };
                    if kind != b':' {
                        return self.fail(at, PatternFault::Collating);
                    }
                    self.at += end + 4;
                    ByteSet::named(&name[..end]).map_or_else(|| self.fail(at, PatternFault::BadClass), |set| Ok(Item::Class(set)))
                }
                Some(_) => {
                    self.at += 1;
                    Ok(Item::Byte(b'['))
                }
                None => self.fail(start, PatternFault::UnclosedClass),
            },
            b'\\' if self.peek_at(1) == Some(b'b') => {
                self.at += 2;
                Ok(Item::Byte(8))
            }
            b'\\' => match self.escaped()? {
                Escaped::Byte(byte) => Ok(Item::Byte(byte)),
                Escaped::Class(set) => Ok(Item::Class(set)),
                Escaped::BackReference(_) | Escaped::Boundary => self.fail(at, PatternFault::BadClass),
            },
            other => {
                self.at += 1;
                Ok(Item::Byte(other))
            }
        }
    }

    fn literal(&mut self, byte: u8) -> u64 {
        let written = write!(self.out, r"\x{byte:02x}");
        debug_assert!(written.is_ok(), "writing to a String cannot fail");
        1
    }

    /// Writes a class as ranges of bytes; one without members matches nothing.
    fn class(&mut self, set: &ByteSet) -> u64 {
        let ranges = set.ranges();
        let mut text = String::from(if ranges.is_empty() { r"[^\x00-\xff" } else { "[" });
        for (from, to) in &ranges {
            let written = write!(text, r"\x{from:02x}-\x{to:02x}");
            debug_assert!(written.is_ok(), "writing to a String cannot fail");
        }
        text.push(']');
        self.out.push_str(&text);
        1 + ranges.len() as u64
    }
}

enum Escaped {
    Byte(u8),
    Class(ByteSet),
    BackReference(usize),
    Boundary,
}

enum Item {
    End,
    Dash,
    Byte(u8),
    Class(ByteSet),
}

/// What the last item in brackets was: a byte may still become the start of a range.
#[derive(Clone, Copy)]
enum Last {
    Nothing,
    Byte(u8),
    Class,
}

impl Last {
    fn push(&mut self, set: &mut ByteSet, next: Last) {
        if let Last::Byte(byte) = *self {
            set.add(byte);
        }
        *self = next;
    }
}
