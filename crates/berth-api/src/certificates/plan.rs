//! How the node comes to its client certificate. Pure. Spec 01 §11.1.

/// What the kubeconfig holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// It loads, and so does a client certificate that has not expired.
    Valid,
    /// It loads, but has no certificate, or an expired one.
    Unproven,
    /// It is missing, or cannot be read.
    NotValid,
}

/// Whether there are credentials to ask for a first certificate with (`--bootstrap-kubeconfig`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BootstrapFile {
    /// Yes.
    Given,
    /// They are named, but not there: who had a node join may have removed them, as kubeadm does.
    Missing,
    /// No.
    NotGiven,
}

/// Whether certificates are replaced while the agent runs (`rotateCertificates`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rotation {
    /// Yes.
    On,
    /// No.
    Off,
}

/// The way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientPath {
    /// The kubeconfig as it is.
    AsIs,
    /// A certificate is asked for first; then as it is.
    BootstrapFirst,
    /// A manager follows the certificate; the kubeconfig may seed it.
    Rotate,
    /// As before, but first a kubeconfig is written that names the manager's files; calls are
    /// anonymous until the first certificate comes.
    BootstrapBehind,
}

/// Which way is gone.
///
/// A node that was off until its certificate had expired, and whose bootstrap is gone, goes on and looks for
/// either again and again; the reference ends, and is started again to find the same.
pub fn plan(rotation: Rotation, bootstrap: BootstrapFile, kubeconfig: Found) -> ClientPath {
    match (rotation, bootstrap, kubeconfig) {
        (Rotation::Off, BootstrapFile::NotGiven, _) | (Rotation::Off, _, Found::Valid) => ClientPath::AsIs,
        (Rotation::Off, ..) => ClientPath::BootstrapFirst,
        (Rotation::On, BootstrapFile::NotGiven, _)
        | (Rotation::On, _, Found::Valid)
        | (Rotation::On, BootstrapFile::Missing, Found::Unproven) => ClientPath::Rotate,
        (Rotation::On, ..) => ClientPath::BootstrapBehind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_path_runs() {
        use {BootstrapFile as B, ClientPath as P, Found as F, Rotation as R};
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
            (R::On, B::Missing, F::NotValid, P::BootstrapBehind), // which tells what is missing
            (R::Off, B::Missing, F::Valid, P::AsIs),
            (R::Off, B::Missing, F::Unproven, P::BootstrapFirst),
            (R::Off, B::Given, F::Unproven, P::BootstrapFirst),
        ] {
            assert_eq!(plan(rotation, bootstrap, found), expected, "{rotation:?} {bootstrap:?} {found:?}");
        }
    }
}
