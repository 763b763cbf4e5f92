//! How much one layer may unpack to, so that a small download cannot fill a disk. Pure.

use serde::{Deserialize, Serialize};

use crate::images::error::{ImageError, Kind};

/// Below this many bytes of input the ratio says nothing.
const RATIO_FROM: u64 = 64 << 20;

/// The largest layer that is unpacked (spec 09 §5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Bounds {
    /// Unpacked bytes.
    pub bytes: u64,
    /// Entries.
    pub entries: u64,
    /// Unpacked by packed bytes.
    pub ratio: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 5_000_000, ratio: 1000 }
    }
}

/// How a layer's directory is used, which decides what deletions look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Form {
    /// As a layer of an overlay: deletions are devices and attributes.
    Overlay {
        /// Whether attributes are the user's (no privilege for trusted ones).
        userxattr: bool,
    },
    /// As a whole tree, the lower layers' files in it: deletions delete.
    Merged,
}

/// Under which rules a layer is unpacked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Policy {
    /// Largest layer.
    pub bounds: Bounds,
    /// What it is for.
    pub form: Form,
    /// Bytes that must stay free on the disk.
    pub keep_free: u64,
}

/// What has come out of a layer so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Bytes of files.
    pub bytes: u64,
    /// Entries.
    pub entries: u64,
}

impl Bounds {
    /// Whether that much may have come out of `packed` bytes; `unpacked` counts the whole stream, headers and holes too.
    ///
    /// # Errors
    /// `layer exceeds limits: …`.
    pub fn check(&self, totals: Totals, packed: u64, unpacked: u64) -> Result<(), ImageError> {
        let exceeded =
            |what: String| Err(ImageError::new(Kind::ResourceExhausted, format!("layer exceeds limits: {what}")));
        let largest = totals.bytes.max(unpacked);
        if largest > self.bytes {
            return exceeded(format!("more than {} bytes", self.bytes));
        }
        if totals.entries > self.entries {
            return exceeded(format!("more than {} entries", self.entries));
        }
        if unpacked > RATIO_FROM && unpacked / self.ratio.max(1) > packed {
            return exceeded(format!("compression ratio above {}", self.ratio));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_named() {
        let bounds = Bounds { bytes: 1 << 40, entries: 10, ratio: 100 };
        let totals = |bytes, entries| Totals { bytes, entries };
        for (totals, packed, unpacked, expected) in [
            (totals(10, 1), 1, 10, None),
            (totals(1 << 20, 1), 1, 1 << 20, None),
            (totals(1 << 30, 1), 1 << 20, 1 << 30, Some("compression ratio above 100")),
            (totals(1 << 30, 1), 11 << 20, 1 << 30, None),
            (totals(0, 11), 1, 10, Some("more than 10 entries")),
            (totals((1 << 40) + 1, 1), 1 << 40, 10, Some("more than 1099511627776 bytes")),
        ] {
            let error = bounds.check(totals, packed, unpacked).err().map(|error| error.text);
            assert_eq!(error, expected.map(|text| format!("layer exceeds limits: {text}")));
        }
    }
}
