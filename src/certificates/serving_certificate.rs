//! Serving pair of the agent if none is configured: `kubelet.crt` and `kubelet.key`.
//!
//! Created at the first start and renewed before it expires (spec 01 §11.6, §20; kubelet never renews it).

use std::{path::Path, time::Duration};

use jiff::Timestamp;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::{
    CertificateError, CertificatePairPaths,
    certificate_info::{CertificateInfo, covers, key_matches},
    issuer::{Authority, MakeError, Validity},
};

/// Validity of a pair in days.
const DAYS: i64 = 365;
/// Interval between checks of the pair's age.
const PERIOD: Duration = Duration::from_secs(3600);

/// Serving pair and the names it is for.
#[derive(Clone, Debug)]
pub struct ServingCertificate {
    files: CertificatePairPaths,
    host: String,
    also: Vec<String>,
}

/// Action needed for a pair.
#[derive(Debug, PartialEq, Eq)]
enum RenewalAction {
    Nothing,
    Make,
    Refuse(MissingFile),
}

/// File that is missing from a pair.
#[derive(Debug, PartialEq, Eq)]
enum MissingFile {
    NoCertificate,
    NoKey,
}

impl ServingCertificate {
    /// Pair in `directory` for the node's host name and, unlike kubelet's, for the additional names in `also`.
    pub fn new(directory: &Path, host: &str, also: Vec<String>) -> Self {
        Self { files: CertificatePairPaths::of(directory, "kubelet"), host: host.to_owned(), also }
    }

    /// Paths of the pair.
    pub fn files(&self) -> &CertificatePairPaths {
        &self.files
    }

    /// Creates the pair if there is none, or renews it if the agent issued it and it is old or lacks a name. A pair
    /// that was not issued by the agent is never changed, however old it is. Blocking.
    ///
    /// # Errors
    /// One file of the pair is missing; or the pair cannot be read, created, or written.
    pub fn ensure(&self, now: Timestamp) -> Result<(), CertificateError> {
        let (certificate, key) = self.files.read_existing()?;
        match self.due(certificate.as_deref(), key.as_deref(), now) {
            RenewalAction::Nothing => Ok(()),
            RenewalAction::Refuse(MissingFile::NoCertificate) => {
                Err(CertificateError::HalfAPair(self.files.certificate.display().to_string()))
            }
            RenewalAction::Refuse(MissingFile::NoKey) => {
                Err(CertificateError::HalfAPair(self.files.key.display().to_string()))
            }
            RenewalAction::Make => {
                self.files.write(&self.make(now)?)?;
                info!(file = %self.files.certificate.display(), "Using self-signed cert");
                Ok(())
            }
        }
    }

    /// Checks the pair periodically until stopped. Errors are logged and retried at the next check.
    pub async fn renew_periodically(self, now: impl Fn() -> Timestamp + Send, stop: CancellationToken) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let (this, now) = (self.clone(), now());
            match tokio::task::spawn_blocking(move || this.ensure(now)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => error!(err = %error, "Failed to renew the serving certificate"),
                Err(error) => error!(err = %error, "Failed to renew the serving certificate"),
            }
        }
    }

    fn due(&self, certificate: Option<&str>, key: Option<&str>, now: Timestamp) -> RenewalAction {
        let (certificate, key) = match (certificate, key) {
            (None, None) => return RenewalAction::Make,
            (None, Some(_)) => return RenewalAction::Refuse(MissingFile::NoCertificate),
            (Some(_), None) => return RenewalAction::Refuse(MissingFile::NoKey),
            (Some(certificate), Some(key)) => (certificate, key),
        };
        let Some(seen) = CertificateInfo::read(certificate).filter(CertificateInfo::is_self_made) else {
            return RenewalAction::Nothing;
        };
        // Certificate and key do not match after a crash between the two writes.
        let is_good = !seen.is_old(now) && covers(&seen, &self.names()) && key_matches(certificate, key);
        if is_good { RenewalAction::Nothing } else { RenewalAction::Make }
    }

    fn make(&self, now: Timestamp) -> Result<super::CertificatePair, MakeError> {
        let (host, stamp, validity) = (&self.host, now.as_second(), Validity::days(now, DAYS));
        let authority = Authority::create(&format!("{host}-ca@{stamp}"), validity)?;
        authority.serving(&format!("{host}@{stamp}"), &self.names(), validity)
    }

    fn names(&self) -> Vec<String> {
        let mut names = vec![self.host.clone()];
        names.extend(self.also.iter().filter(|name| **name != self.host).cloned());
        names
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn at(days: i64) -> Timestamp {
        Timestamp::from_second(1_767_225_600 + days * 86_400).expect("a time")
    }

    fn text(path: &Path) -> String {
        std::fs::read_to_string(path).expect("readable")
    }

    #[test]
    fn a_pair_is_made_once_and_again_before_it_expires() {
        let folder = tempfile::tempdir().expect("a folder");
        let directory = folder.path().join("pki");
        let serving = ServingCertificate::new(&directory, "node-1", Vec::new());
        serving.ensure(at(0)).expect("made");
        let first = text(&serving.files.certificate);
        let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&serving.files.certificate), mode(&serving.files.key)), (0o644, 0o600));
        assert_eq!(first.matches("BEGIN CERTIFICATE").count(), 2, "the leaf, then its authority");
        let seen = CertificateInfo::read(&first).expect("a certificate");
        let stamp = at(0).as_second();
        assert_eq!(seen.names, (format!("node-1@{stamp}"), format!("node-1-ca@{stamp}")));
        assert_eq!(seen.hosts, ["node-1"]);
        assert_eq!(seen.valid, (stamp - 3600, stamp - 3600 + 365 * 86_400));

        serving.ensure(at(320)).expect("looked at");
        assert_eq!(text(&serving.files.certificate), first);
        serving.ensure(at(329)).expect("made");
        assert_ne!(text(&serving.files.certificate), first);
        let second = text(&serving.files.certificate);
        let other = Authority::create("x", Validity::days(at(0), 1)).expect("an authority");
        std::fs::write(&serving.files.key, &other.own().key).expect("written");
        serving.ensure(at(329)).expect("made");
        assert_ne!(text(&serving.files.certificate), second, "its key was that of another");
        let renamed = ServingCertificate::new(&directory, "10.0.0.7", vec!["localhost".to_owned()]);
        renamed.ensure(at(330)).expect("made");
        assert_eq!(
            CertificateInfo::read(&text(&renamed.files.certificate)).expect("one").hosts,
            ["10.0.0.7", "localhost"]
        );
    }

    #[test]
    fn a_foreign_certificate_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let serving = ServingCertificate::new(folder.path(), "node-1", Vec::new());
        let foreign = Authority::create("corporate", Validity::days(at(-700), 30)).expect("an authority");
        let issued = foreign.serving("other", &["other".to_owned()], Validity::days(at(-700), 30)).expect("issued");
        serving.files.write(&issued).expect("written");
        serving.ensure(at(0)).expect("left alone");
        assert_eq!(text(&serving.files.certificate), issued.certificate);
    }

    #[test]
    fn half_a_pair_is_an_error() {
        // AC-01-31
        for (kept, missing) in [("crt", "key"), ("key", "crt")] {
            let folder = tempfile::tempdir().expect("a folder");
            let serving = ServingCertificate::new(folder.path(), "node-1", Vec::new());
            std::fs::write(folder.path().join(format!("kubelet.{kept}")), "x").expect("written");
            let path = folder.path().join(format!("kubelet.{missing}"));
            let expected = format!("error reading {}, certificate and key must be supplied as a pair", path.display());
            assert_eq!(serving.ensure(at(0)).expect_err("half a pair").to_string(), expected);
        }
    }

    #[test]
    fn what_cannot_be_read_is_not_called_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let serving = ServingCertificate::new(folder.path(), "node-1", Vec::new());
        serving.ensure(at(0)).expect("made");
        std::fs::remove_file(&serving.files.key).expect("removed");
        std::fs::create_dir(&serving.files.key).expect("made"); // root may read any file, but no directory
        let error = serving.ensure(at(0)).expect_err("a directory").to_string();
        assert!(error.starts_with(&format!("cannot read {}: ", serving.files.key.display())), "{error}");
    }
}
