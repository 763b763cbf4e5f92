//! Makes keys and certificates: no files, no clock.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// How far back a new certificate holds, for clients whose clocks are behind.
const BACK: SignedDuration = SignedDuration::from_hours(1);

/// A certificate cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot make a certificate for {name}: {cause}")]
pub struct MakeError {
    name: String,
    cause: rcgen::Error,
}

fn wrong(name: &str) -> impl Fn(rcgen::Error) -> MakeError + '_ {
    move |cause| MakeError { name: name.to_owned(), cause }
}

/// When a certificate holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    from: Timestamp,
    until: Timestamp,
}

impl Validity {
    /// From an hour before `now`, for so many days.
    pub fn days(now: Timestamp, days: i64) -> Self {
        let from = now.checked_sub(BACK).unwrap_or(now);
        let length = SignedDuration::from_hours(days.saturating_mul(24));
        Self { from, until: from.checked_add(length).unwrap_or(Timestamp::MAX) }
    }
}

/// A certificate (chain) and its key, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The certificate; where it is one, the leaf first.
    pub certificate: String,
    /// The key, PKCS #8.
    pub key: String,
}

/// An authority that signs.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    own: Issued,
}

impl Authority {
    /// A new one of that name.
    ///
    /// # Errors
    /// The name cannot be written.
    pub fn create(name: &str, validity: Validity) -> Result<Self, MakeError> {
        let mut params = params(name, &[], validity);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().map_err(wrong(name))?;
        let certificate = params.self_signed(&key).map_err(wrong(name))?.pem();
        let own = Issued { certificate, key: key.serialize_pem() };
        Ok(Self { issuer: Issuer::new(params, key), own })
    }

    /// One that was made before.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn load(own: Issued) -> Result<Self, MakeError> {
        let wrong = wrong("the stored authority");
        let key = KeyPair::from_pem(&own.key).map_err(&wrong)?;
        let issuer = Issuer::from_ca_cert_pem(&own.certificate, key).map_err(&wrong)?;
        Ok(Self { issuer, own })
    }

    /// Its own certificate and key.
    pub fn own(&self) -> &Issued {
        &self.own
    }

    /// A server's certificate, with the authority's behind it.
    ///
    /// # Errors
    /// A name cannot be written.
    pub fn serving(&self, name: &str, names: &[String], validity: Validity) -> Result<Issued, MakeError> {
        let mut params = params(name, &[], validity);
        params.subject_alt_names = CertificateParams::new(names).map_err(wrong(name))?.subject_alt_names;
        let mut issued = self.issue(params, ExtendedKeyUsagePurpose::ServerAuth, name)?;
        issued.certificate.push_str(&self.own.certificate);
        Ok(issued)
    }

    /// A client's certificate.
    ///
    /// # Errors
    /// A name cannot be written.
    pub fn client(&self, user: &str, groups: &[&str], validity: Validity) -> Result<Issued, MakeError> {
        self.issue(params(user, groups, validity), ExtendedKeyUsagePurpose::ClientAuth, user)
    }

    fn issue(
        &self,
        mut params: CertificateParams,
        usage: ExtendedKeyUsagePurpose,
        name: &str,
    ) -> Result<Issued, MakeError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(wrong(name))?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(wrong(name))?;
        Ok(Issued { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn params(name: &str, groups: &[&str], validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut subject = DistinguishedName::new();
    for group in groups {
        subject.push(DnType::OrganizationName, *group);
    }
    subject.push(DnType::CommonName, name);
    params.distinguished_name = subject;
    let time = |at: Timestamp| {
        let seconds = u64::try_from(at.as_second()).unwrap_or_default();
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds)
    };
    (params.not_before, params.not_after) = (time(validity.from), time(validity.until));
    params
}
