//! Creates X.509 keys and certificates in memory, without files or clock.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// Time before `now` at which a new certificate becomes valid, for clients whose clocks are behind.
const BACK: SignedDuration = SignedDuration::from_hours(1);

/// A certificate cannot be created or loaded.
#[derive(Debug, thiserror::Error)]
#[error("cannot create a certificate for {name}: {cause}")]
pub struct MakeError {
    name: String,
    cause: rcgen::Error,
}

fn wrong(name: &str) -> impl Fn(rcgen::Error) -> MakeError + '_ {
    move |cause| MakeError { name: name.to_owned(), cause }
}

/// Validity period of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    from: Timestamp,
    until: Timestamp,
}

impl Validity {
    /// Period of `days` days that starts one hour before `now`.
    pub fn days(now: Timestamp, days: i64) -> Self {
        let from = now.checked_sub(BACK).unwrap_or(now);
        let length = SignedDuration::from_hours(days.saturating_mul(24));
        Self { from, until: from.checked_add(length).unwrap_or(Timestamp::MAX) }
    }
}

/// Certificate (chain) and its key, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificatePair {
    /// Certificate; in a chain, the leaf first.
    pub certificate: String,
    /// Private key, PKCS #8.
    pub key: String,
}

/// Certificate authority that signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    own: CertificatePair,
}

impl Authority {
    /// Creates a self-signed CA with that common name.
    ///
    /// # Errors
    /// The name cannot be encoded or the key cannot be generated.
    pub fn create(name: &str, validity: Validity) -> Result<Self, MakeError> {
        let mut params = params(name, &[], validity);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().map_err(wrong(name))?;
        let certificate = params.self_signed(&key).map_err(wrong(name))?.pem();
        let own = CertificatePair { certificate, key: key.serialize_pem() };
        Ok(Self { issuer: Issuer::new(params, key), own })
    }

    /// Loads a stored CA.
    ///
    /// # Errors
    /// The certificate or key cannot be parsed.
    pub fn load(own: CertificatePair) -> Result<Self, MakeError> {
        let wrong = wrong("the stored certificate authority");
        let key = KeyPair::from_pem(&own.key).map_err(&wrong)?;
        let issuer = Issuer::from_ca_cert_pem(&own.certificate, key).map_err(&wrong)?;
        Ok(Self { issuer, own })
    }

    /// Certificate and key of the CA.
    pub fn own(&self) -> &CertificatePair {
        &self.own
    }

    /// Issues a server certificate, followed by the CA's certificate.
    ///
    /// # Errors
    /// A name cannot be encoded.
    pub fn serving(&self, name: &str, names: &[String], validity: Validity) -> Result<CertificatePair, MakeError> {
        let mut params = params(name, &[], validity);
        params.subject_alt_names = CertificateParams::new(names).map_err(wrong(name))?.subject_alt_names;
        let mut issued = self.issue(params, ExtendedKeyUsagePurpose::ServerAuth, name)?;
        issued.certificate.push_str(&self.own.certificate);
        Ok(issued)
    }

    /// Issues a client certificate for a user and its groups.
    ///
    /// # Errors
    /// A name cannot be encoded.
    pub fn client(&self, user: &str, groups: &[&str], validity: Validity) -> Result<CertificatePair, MakeError> {
        self.issue(params(user, groups, validity), ExtendedKeyUsagePurpose::ClientAuth, user)
    }

    fn issue(
        &self,
        mut params: CertificateParams,
        usage: ExtendedKeyUsagePurpose,
        name: &str,
    ) -> Result<CertificatePair, MakeError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(wrong(name))?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(wrong(name))?;
        Ok(CertificatePair { certificate: certificate.pem(), key: key.serialize_pem() })
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
