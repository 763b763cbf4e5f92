//! What loading the configuration has to tell before there is a log. Pure.
//!
//! Loading returns these; whoever starts the log writes them, each with its own message and keys.

use std::collections::BTreeMap;

use super::effective::NotYet;

/// Something worth a log line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    /// A flag was used that should not be; the whole line.
    DeprecatedFlag(String),
    /// A strict decoding failed, a lenient one did not (spec 01 §3.2).
    LenientDecoding {
        /// The strict error.
        error: String,
        /// Unknown fields and the fields they may have meant.
        hints: Vec<String>,
    },
    /// A gate that is always on was set.
    GaGate {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: bool,
    },
    /// A gate on its way out was set.
    DeprecatedGate {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: bool,
    },
    /// A file of the drop-in directory is none.
    SkippedDropin {
        /// The file.
        path: String,
    },
    /// A drop-in was merged.
    AppliedDropin {
        /// The file.
        path: String,
        /// The fields it sets.
        fields: Vec<String>,
        /// Those of them the configuration does not have.
        unknown: Vec<String>,
    },
    /// A directory that is a link, so that nothing in it is read.
    LinkedDropinDirectory {
        /// The directory.
        path: String,
    },
    /// A drop-in sets a field on which another field's default depends; the default was fixed before.
    LateDefault {
        /// The file.
        path: String,
        /// The field it sets.
        field: &'static str,
        /// The field whose default stays.
        keeps: &'static str,
    },
    /// Hard eviction knows no threshold for some disk or inode signal.
    EvictionSignalsUnset {
        /// The signals.
        signals: Vec<&'static str>,
    },
    /// A setting that lets strangers in.
    Insecure {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// A setting whose feature is not there yet.
    NotYetEffective(NotYet),
    /// Cipher suites are chosen by TLS 1.3 itself.
    CipherSuitesIgnored,
    /// A cipher suite known to be weak.
    InsecureCipher {
        /// Its name.
        name: String,
    },
    /// `reservedSystemCPUs` takes the place of CPU in `kubeReserved` and `systemReserved`.
    CpusOverwritten {
        /// What both were.
        before: (BTreeMap<String, String>, BTreeMap<String, String>),
        /// What they are.
        after: (BTreeMap<String, String>, BTreeMap<String, String>),
    },
    /// There is swap, and `failSwapOn` is not switched off.
    SwapIsOn,
    /// A node address that is no address.
    BadNodeIps {
        /// The texts.
        ips: Vec<String>,
    },
    /// A DNS server that is no address; it is dropped.
    BadClusterDns {
        /// The text.
        ip: String,
    },
    /// The agent's own cgroup lies outside of `kubeReservedCgroup`.
    CgroupOutsideReservation,
}

impl Notice {
    /// Whether this is a drop-in that sets a field.
    pub fn sets(&self, field: &str) -> bool {
        matches!(self, Self::AppliedDropin { fields, .. } if fields.iter().any(|set| set == field))
    }

    /// What a strict reader of the files would refuse, if this is about that.
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
