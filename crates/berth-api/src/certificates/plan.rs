//! Choice of the client certificate path: kubeconfig as is, bootstrap, or rotation. Pure.
//!
//! Implements spec 01 §11.1.

/// Result of classifying a kubeconfig by readability and client certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KubeconfigState {
    /// It loads and has a client certificate that is not expired.
    Valid,
    /// It loads, but has no certificate or an expired one.
    Unproven,
    /// It is missing or cannot be read.
    NotValid,
}

/// Whether a bootstrap kubeconfig exists (`--bootstrap-kubeconfig`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BootstrapFile {
    /// The flag is set and the file exists.
    Given,
    /// The flag is set, but the file is missing: the installer may have deleted it, as kubeadm does.
    Missing,
    /// The flag is not set.
    NotGiven,
}

/// Whether certificates are rotated while the agent runs (`rotateCertificates`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rotation {
    /// Rotation is enabled.
    On,
    /// Rotation is disabled.
    Off,
}

/// Path by which the node obtains its client certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientPath {
    /// Uses the kubeconfig as it is.
    AsIs,
    /// Requests a certificate first, blocking; then uses the kubeconfig as it is.
    BootstrapFirst,
    /// A manager rotates the certificate; the kubeconfig may seed it.
    Rotate,
    /// As [`ClientPath::Rotate`], but first writes a kubeconfig that refers to the manager's files; requests are
    /// anonymous until the first certificate is issued.
    BootstrapBehind,
}

/// Chooses the path.
///
/// A node that was off until its certificate expired, and whose bootstrap kubeconfig is missing, keeps running and
/// rereads both files repeatedly; the kubelet exits and is restarted into the same state.
pub fn plan(rotation: Rotation, bootstrap: BootstrapFile, kubeconfig: KubeconfigState) -> ClientPath {
    match (rotation, bootstrap, kubeconfig) {
        (Rotation::Off, BootstrapFile::NotGiven, _) | (Rotation::Off, _, KubeconfigState::Valid) => ClientPath::AsIs,
        (Rotation::Off, ..) => ClientPath::BootstrapFirst,
        (Rotation::On, BootstrapFile::NotGiven, _)
        | (Rotation::On, _, KubeconfigState::Valid)
        | (Rotation::On, BootstrapFile::Missing, KubeconfigState::Unproven) => ClientPath::Rotate,
        (Rotation::On, ..) => ClientPath::BootstrapBehind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_path_runs() {
        use {BootstrapFile as B, ClientPath as P, KubeconfigState as F, Rotation as R};
        for (rotation, bootstrap, found, expected) in [
            (R::Off, B::NotGiven, F::Valid, P::AsIs),
            (R::Off, B::NotGiven, F::NotValid, P::AsIs), // a token, an exec plugin
            (R::Off, B::Given, F::Valid, P::AsIs),
            (R::Off, B::Given, F::NotValid, P::BootstrapFirst),
            (R::On, B::NotGiven, F::Valid, P::Rotate),
            (R::On, B::NotGiven, F::NotValid, P::Rotate),
            (R::On, B::Given, F::Valid, P::Rotate),
            (R::On, B::Given, F::NotValid, P::BootstrapBehind), // AC-01-32
            (R::On, B::Given, F::Unproven, P::BootstrapBehind),
            (R::On, B::Missing, F::Valid, P::Rotate),
            (R::On, B::Missing, F::Unproven, P::Rotate),
            (R::On, B::Missing, F::NotValid, P::BootstrapBehind), // the error names the missing file
            (R::Off, B::Missing, F::Valid, P::AsIs),
            (R::Off, B::Missing, F::Unproven, P::BootstrapFirst),
            (R::Off, B::Given, F::Unproven, P::BootstrapFirst),
        ] {
            assert_eq!(plan(rotation, bootstrap, found), expected, "{rotation:?} {bootstrap:?} {found:?}");
        }
    }
}
