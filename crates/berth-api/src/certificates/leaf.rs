//! Subject, names, and validity of a leaf certificate. Pure.

use std::net::IpAddr;

use rustls::pki_types::{CertificateDer, pem::PemObject};
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer, X509Certificate, X509Name},
};

use super::template::Template;

/// Subject, names, and validity of the first certificate of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Common name of the subject.
    pub common_name: String,
    /// Organizations of the subject.
    pub organizations: Vec<String>,
    /// DNS names among the subject alternative names.
    pub dns: Vec<String>,
    /// IP addresses among the subject alternative names.
    pub ips: Vec<IpAddr>,
    /// First second of validity, since the epoch.
    pub not_before: i64,
    /// Last second of validity, since the epoch.
    pub not_after: i64,
}

impl Leaf {
    /// Parses the first certificate of a PEM text; `None` if there is none or it is malformed.
    pub fn read(pem: &str) -> Option<Self> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
        let (_, certificate) = X509Certificate::from_der(&der).ok()?;
        let subject = certificate.subject();
        let alternatives = certificate.subject_alternative_name().ok().flatten();
        let names = || alternatives.iter().flat_map(|list| &list.value.general_names);
        Some(Self {
            common_name: common_name(subject),
            organizations: subject.iter_organization().filter_map(|o| o.as_str().ok()).map(str::to_owned).collect(),
            dns: names().filter_map(dns).collect(),
            ips: names().filter_map(ip).collect(),
            not_before: certificate.validity().not_before.timestamp(),
            not_after: certificate.validity().not_after.timestamp(),
        })
    }

    /// Whether the last second of validity has passed.
    pub fn is_expired(&self, now: i64) -> bool {
        now > self.not_after
    }

    /// Whether the certificate has all names that the template requests; more names are accepted.
    pub fn covers(&self, template: &Template) -> bool {
        self.common_name == template.common_name()
            && self.organizations.iter().any(|own| own == Template::ORGANIZATION)
            && template.dns.iter().all(|name| self.dns.contains(name))
            && template.ips.iter().all(|ip| self.ips.contains(ip))
    }
}

/// Whether a PEM text has at least one certificate, and all of them parse and are unexpired.
pub fn all_hold(pem: &str, now: i64) -> bool {
    let mut count = 0_u32;
    for der in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let Ok(der) = der else { return false };
        let Ok((_, certificate)) = X509Certificate::from_der(&der) else { return false };
        if now > certificate.validity().not_after.timestamp() {
            return false;
        }
        count += 1;
    }
    count > 0
}

fn common_name(name: &X509Name<'_>) -> String {
    name.iter_common_name().last().and_then(|cn| cn.as_str().ok()).unwrap_or_default().to_owned()
}

fn dns(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    }
}

fn ip(name: &GeneralName<'_>) -> Option<IpAddr> {
    let GeneralName::IPAddress(bytes) = name else { return None };
    let four = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
    four.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from)).ok()
}
