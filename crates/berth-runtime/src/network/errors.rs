//! Errors of pod networks.

use std::{io, time::Duration};

use super::{bandwidth::BandwidthError, cidr::NotACidr, host_ports::PortError, ipam::RangeExhausted};

/// A failed network operation.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// All addresses are leased.
    #[error(transparent)]
    NoAddress(#[from] RangeExhausted),
    /// A host port is unavailable.
    #[error(transparent)]
    HostPort(#[from] PortError),
    /// The kernel has no nf_tables, which host ports need.
    #[error("hostPort needs nf_tables")]
    NoFilter,
    /// A bandwidth limit is invalid.
    #[error(transparent)]
    Bandwidth(#[from] BandwidthError),
    /// A pod CIDR is malformed.
    #[error(transparent)]
    Range(#[from] NotACidr),
    /// The network is not ready.
    #[error("{0}")]
    NotReady(String),
    /// A CNI plugin failed, or the CNI configuration is invalid.
    #[error("{0}")]
    Cni(String),
    /// A kernel request or system call failed.
    #[error("{what}: {source}")]
    Kernel {
        /// Operation that failed.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// The port inside the pod does not respond.
    #[error("{0}")]
    Dial(String),
    /// The operation timed out.
    #[error("{what}: timed out after {limit:?}")]
    TimedOut {
        /// Operation that timed out.
        what: &'static str,
        /// Timeout.
        limit: Duration,
    },
}

impl NetworkError {
    /// An error of a kernel request.
    pub fn kernel(what: impl Into<String>, source: io::Error) -> Self {
        Self::Kernel { what: what.into(), source }
    }
}
