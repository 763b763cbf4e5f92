//! What can go wrong with a pod's network.

use std::{io, time::Duration};

use super::{bandwidth::BandwidthError, cidr::NotACidr, host_ports::PortError, ipam::Exhausted};

/// Why a pod has no network, or keeps it.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// No address is left.
    #[error(transparent)]
    NoAddress(#[from] Exhausted),
    /// A port of the machine cannot be had.
    #[error(transparent)]
    HostPort(#[from] PortError),
    /// The kernel cannot lead ports to pods.
    #[error("hostPort needs nf_tables")]
    NoFilter,
    /// A limit of its speed makes no sense.
    #[error(transparent)]
    Bandwidth(#[from] BandwidthError),
    /// The node's range is none.
    #[error(transparent)]
    Range(#[from] NotACidr),
    /// There is no network yet.
    #[error("{0}")]
    NotReady(String),
    /// What plugins or their configuration say.
    #[error("{0}")]
    Cni(String),
    /// The kernel refused something.
    #[error("{what}: {source}")]
    Kernel {
        /// What was attempted.
        what: String,
        /// What it said.
        source: io::Error,
    },
    /// A port inside the pod does not answer.
    #[error("{0}")]
    Dial(String),
    /// It took too long.
    #[error("{what}: no end within {limit:?}")]
    TimedOut {
        /// What was attempted.
        what: &'static str,
        /// How long it had.
        limit: Duration,
    },
}

impl NetworkError {
    /// What the kernel said to an attempt.
    pub fn kernel(what: impl Into<String>, source: io::Error) -> Self {
        Self::Kernel { what: what.into(), source }
    }
}
