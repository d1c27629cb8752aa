//! Decisions, taken from an input; zeros once it is used up.

/// What is left of the input.
pub struct Choices<'a>(pub &'a [u8]);

impl<'a> Choices<'a> {
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn below(&mut self, n: u8) -> u8 {
        self.byte() % n
    }

    /// Rarely yes.
    pub fn rarely(&mut self) -> bool {
        self.byte() > 230
    }

    /// Up to this many bytes.
    #[allow(dead_code, reason = "not every target needs it")]
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
