//! Notices from loading the configuration, collected before logging is set up. Pure.
//!
//! Loading returns them; once logging is set up, the caller logs each with its own message and keys.

use std::collections::BTreeMap;

use super::unimplemented_settings::UnimplementedSetting;

/// A fact to log at startup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    /// A deprecated flag was used; contains the complete line.
    DeprecatedFlag(String),
    /// Strict decoding of the configuration file failed, lenient decoding succeeded (spec 01 §3.2).
    LenientDecoding {
        /// Error of the strict decoding.
        error: String,
        /// Unknown fields and the fields they probably meant.
        hints: Vec<String>,
    },
    /// A GA gate was set.
    GaGate {
        /// Name of the gate.
        name: &'static str,
        /// Value of the gate.
        value: bool,
    },
    /// A deprecated gate was set.
    DeprecatedGate {
        /// Name of the gate.
        name: &'static str,
        /// Value of the gate.
        value: bool,
    },
    /// A file in the drop-in directory is not a drop-in.
    SkippedDropin {
        /// Path of the file.
        path: String,
    },
    /// A drop-in was merged.
    AppliedDropin {
        /// Path of the file.
        path: String,
        /// Fields that it sets.
        fields: Vec<String>,
        /// Fields among its content that the configuration does not have.
        unknown: Vec<String>,
    },
    /// A directory is a symbolic link and was not read.
    LinkedDropinDirectory {
        /// Path of the directory.
        path: String,
    },
    /// A drop-in sets a field on which another field's default depends, after that default was fixed.
    LateDefault {
        /// Path of the file.
        path: String,
        /// Field that it sets.
        field: &'static str,
        /// Field whose default is unchanged.
        keeps: &'static str,
    },
    /// Hard eviction has no threshold for some disk or inode signals.
    EvictionSignalsUnset {
        /// The signals without a threshold.
        signals: Vec<&'static str>,
    },
    /// A setting permits access without authentication or authorization.
    Insecure {
        /// Field of the setting.
        field: &'static str,
        /// Value of the field.
        value: String,
    },
    /// A setting whose feature is not implemented.
    NotYetEffective(UnimplementedSetting),
    /// A setting has no effect, because the feature gate that it requires is off.
    GateOff {
        /// Field of the setting.
        setting: &'static str,
        /// Name of the gate.
        gate: &'static str,
    },
    /// `tlsCipherSuites` has no effect, because TLS 1.3 selects its cipher suites itself.
    CipherSuitesIgnored,
    /// An insecure cipher suite is configured.
    InsecureCipher {
        /// Name of the cipher suite.
        name: String,
    },
    /// `reservedSystemCPUs` replaces the CPU in `kubeReserved` and `systemReserved`.
    CpusOverwritten {
        /// Both reservations before the replacement.
        before: (BTreeMap<String, String>, BTreeMap<String, String>),
        /// Both reservations after the replacement.
        after: (BTreeMap<String, String>, BTreeMap<String, String>),
    },
    /// Swap is on and `failSwapOn` is set.
    SwapIsOn,
    /// Some values of `--node-ip` are not addresses.
    BadNodeIps {
        /// The invalid values.
        ips: Vec<String>,
    },
    /// A value of `clusterDNS` is not an address and is ignored.
    BadClusterDns {
        /// The invalid value.
        ip: String,
    },
    /// The agent's own cgroup is outside of `kubeReservedCgroup`.
    CgroupOutsideReservation,
}

impl Notice {
    /// Whether this notice is a merged drop-in that sets the field.
    pub fn sets(&self, field: &str) -> bool {
        matches!(self, Self::AppliedDropin { fields, .. } if fields.iter().any(|set| set == field))
    }

    /// Returns the error of a strict reader of the files, if the notice is about one.
    pub fn strict_error(&self) -> Option<String> {
        match self {
            Self::LenientDecoding { error, .. } => Some(error.clone()),
            Self::AppliedDropin { path, unknown, .. } if !unknown.is_empty() => {
                let fields: Vec<String> =
                    unknown.iter().map(|path| format!("unknown field {}", super::text::quote(path))).collect();
                Some(format!("{path}: strict decoding error: {}", fields.join(", ")))
            }
            _ => None,
        }
    }
}
