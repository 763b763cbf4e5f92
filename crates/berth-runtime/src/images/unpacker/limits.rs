//! Limits on the unpacked size of a layer, against decompression bombs. Pure.

use serde::{Deserialize, Serialize};

use crate::images::error::{ImageError, ImageErrorKind};

/// Below this many unpacked bytes the ratio is not checked.
const RATIO_FROM: u64 = 64 << 20;

/// Limits of one layer (spec 09 §5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayerLimits {
    /// Unpacked bytes; default 64 GiB.
    pub bytes: u64,
    /// Entries; default 5,000,000.
    pub entries: u64,
    /// Unpacked bytes per compressed byte; default 1000.
    pub ratio: u64,
}

impl Default for LayerLimits {
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 5_000_000, ratio: 1000 }
    }
}

/// Use of a layer's directory, which decides the representation of deletions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum LayerFormat {
    /// A layer of an overlay: deletions are device nodes and attributes.
    Overlay {
        /// Whether `user.` attributes replace `trusted.` ones, for lack of privilege.
        userxattr: bool,
    },
    /// A merged tree that contains the files of lower layers: deletions are carried out.
    Merged,
}

/// Limits and format for unpacking a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UnpackPolicy {
    /// Limits of the layer.
    pub bounds: LayerLimits,
    /// Use of the directory.
    pub form: LayerFormat,
    /// Minimum free space on the disk, bytes.
    pub keep_free: u64,
}

/// Amount unpacked from a layer so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Bytes of files.
    pub bytes: u64,
    /// Number of entries.
    pub entries: u64,
}

impl LayerLimits {
    /// Checks the amounts; `unpacked` counts the whole stream, including headers and holes.
    ///
    /// # Errors
    /// `layer exceeds limits: …`.
    pub fn check(&self, totals: Totals, packed: u64, unpacked: u64) -> Result<(), ImageError> {
        let exceeded = |what: String| {
            Err(ImageError::new(ImageErrorKind::ResourceExhausted, format!("layer exceeds limits: {what}")))
        };
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
        let bounds = LayerLimits { bytes: 1 << 40, entries: 10, ratio: 100 };
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
