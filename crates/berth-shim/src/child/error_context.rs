//! Error conversion: failures with the attempted operation before the kernel's error.

use std::{fmt::Display, io};

use crate::plan::{FailureKind, ShimFailure};

/// Result of a step that may fail.
pub(super) type Step<T> = Result<T, ShimFailure>;

/// Builds a failure without a specific kind.
pub(super) fn failure(text: impl Into<String>) -> ShimFailure {
    ShimFailure { kind: FailureKind::Other, text: text.into() }
}

/// The kernel's error as runtimes spell it: `permission denied`.
pub(super) fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error ").next().unwrap_or_default();
    let mut letters = text.chars();
    match letters.next() {
        Some(first) if error.raw_os_error().is_some() => first.to_lowercase().chain(letters).collect(),
        _ => text.to_owned(),
    }
}

/// Adds the attempted operation to an error.
pub(super) trait ErrorContext<T> {
    /// Converts an error to a failure with the text `what: reason`.
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Step<T>;
}

impl<T, E: Into<io::Error>> ErrorContext<T> for Result<T, E> {
    fn context<W: Display>(self, what: impl FnOnce() -> W) -> Step<T> {
        self.map_err(|error| failure(format!("{}: {}", what(), reason(&error.into()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_speaks_in_small_letters() {
        let failed: Step<()> = Err(io::Error::from_raw_os_error(13)).context(|| "mount /dev");
        assert_eq!(failed.expect_err("failed").text, "mount /dev: permission denied");
        assert_eq!(reason(&io::Error::other("Not of the kernel")), "Not of the kernel");
    }
}
