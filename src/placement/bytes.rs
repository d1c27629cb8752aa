//! Sizes for people.
//!
//! Owns: how a number of bytes is written. Must not know: what is measured.

/// A size for a person: three figures and a binary unit.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(
    /// How many.
    pub u64,
);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit < 6 {
            value /= 1024.0;
            unit += 1;
        }
        let digits = if unit == 0 || value >= 100.0 {
            0
        } else if value >= 10.0 {
            1
        } else {
            2
        };
        f.pad(&format!("{value:.digits$} {}", UNITS[unit]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_figures_and_a_binary_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1 << 20, "1.00 MiB"),
            (13 << 30, "13.0 GiB"),
            (999 << 30, "999 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>9}", Bytes(1024)), " 1.00 KiB");
    }
}
