//! What a certificate says of whom it is for and how long. Pure.

use std::net::IpAddr;

use rustls::pki_types::{CertificateDer, pem::PemObject};
use x509_parser::{
    extensions::GeneralName,
    prelude::{FromDer, X509Certificate, X509Name},
};

use super::template::Template;

/// What counts of the first certificate of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Common name of the subject.
    pub common_name: String,
    /// Its organizations.
    pub organizations: Vec<String>,
    /// DNS names.
    pub dns: Vec<String>,
    /// Addresses.
    pub ips: Vec<IpAddr>,
    /// First second it holds, since the epoch.
    pub not_before: i64,
    /// Last second it holds, since the epoch.
    pub not_after: i64,
}

impl Leaf {
    /// The first certificate of a PEM text; `None` where there is none that can be read.
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

    /// Whether its last second is over.
    pub fn is_expired(&self, now: i64) -> bool {
        now > self.not_after
    }

    /// Whether it names all that the template wants; more is fine.
    pub fn covers(&self, template: &Template) -> bool {
        self.common_name == template.common_name()
            && self.organizations.iter().any(|own| own == Template::ORGANIZATION)
            && template.dns.iter().all(|name| self.dns.contains(name))
            && template.ips.iter().all(|ip| self.ips.contains(ip))
    }
}

/// Whether every certificate of a PEM text can be read and still holds, and there is one at all.
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
