//! CA and administrator certificate of a standalone node.
//!
//! The certificate gives the local user full access. No other client is authorized, so that no endpoint is open.

use std::path::Path;

use jiff::Timestamp;
use rustls::pki_types::{CertificateDer, pem::PemObject};

use super::{
    CertificateError, CertificatePair, CertificatePairPaths,
    certificate_info::{CertificateInfo, key_matches},
    issuer::{Authority, Validity},
};
use berth_server::auth::{ClientCas, MASTERS, identify};

/// Validity of the CA in days.
const CA_DAYS: i64 = 3650;
/// Validity of the administrator's certificate in days; a start near its end renews it.
const ADMIN_DAYS: i64 = 365;

/// Paths of the CA and the administrator's pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// CA that client certificates are verified against.
    pub authority: CertificatePairPaths,
    /// Client pair of the administrator.
    pub client: CertificatePairPaths,
}

/// Creates or renews the files that are missing, expire soon, or do not match. Blocking.
///
/// # Errors
/// A file cannot be created or written.
pub fn ensure_admin(directory: &Path, user: &str, now: Timestamp) -> Result<Admin, CertificateError> {
    let files = Admin {
        authority: CertificatePairPaths::of(directory, "berth-ca"),
        client: CertificatePairPaths::of(directory, "berth-admin"),
    };
    let authority = match stored(&files.authority, now) {
        Some(authority) => authority,
        None => {
            let authority = Authority::create("berth standalone", Validity::days(now, CA_DAYS))?;
            files.authority.write(authority.own())?;
            authority
        }
    };
    if !is_good(&files.client, authority.own(), now) {
        files.client.write(&authority.client(user, &[MASTERS], Validity::days(now, ADMIN_DAYS))?)?;
    }
    Ok(files)
}

fn stored(files: &CertificatePairPaths, now: Timestamp) -> Option<Authority> {
    let (Some(certificate), Some(key)) = files.read() else { return None };
    let is_young = CertificateInfo::read(&certificate).is_some_and(|seen| !seen.is_old(now));
    // Certificate and key do not match after a crash between the two writes: what the key signs would be rejected.
    let is_whole = is_young && key_matches(&certificate, &key);
    is_whole.then(|| Authority::load(CertificatePair { certificate, key }).ok()).flatten()
}

/// True if the certificate authenticates an administrator and does not expire soon.
fn is_good(files: &CertificatePairPaths, authority: &CertificatePair, now: Timestamp) -> bool {
    let (Some(certificate), Some(key)) = files.read() else { return false };
    if !key_matches(&certificate, &key) {
        return false;
    }
    let (Ok(der), Ok(cas)) =
        (CertificateDer::from_pem_slice(certificate.as_bytes()), ClientCas::from_pem(authority.certificate.as_bytes()))
    else {
        return false;
    };
    let is_master = matches!(identify(&[der], &cas, now), Ok(Some(proof)) if proof.identity.is_in(MASTERS));
    is_master && CertificateInfo::read(&certificate).is_some_and(|seen| !seen.is_old(now))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn at(days: i64) -> Timestamp {
        Timestamp::from_second(1_767_225_600 + days * 86_400).expect("a time")
    }

    #[test]
    fn the_local_user_gets_in_and_keeps_the_certificate_while_it_is_good() {
        let folder = tempfile::tempdir().expect("a folder");
        let keep = |days: i64| ensure_admin(folder.path(), "root", at(days)).expect("made");
        let admin = keep(0);
        let read = |files: &CertificatePairPaths| fs::read_to_string(&files.certificate).expect("readable");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&admin.authority.key), mode(&admin.client.key)), (0o600, 0o600));

        let cas = ClientCas::from_pem(read(&admin.authority).as_bytes()).expect("a bundle");
        let der = CertificateDer::from_pem_slice(read(&admin.client).as_bytes()).expect("a certificate");
        let proof = identify(&[der], &cas, at(0)).expect("good").expect("somebody");
        assert_eq!((proof.identity.name.as_str(), proof.identity.groups), ("root", vec![MASTERS.to_owned()]));

        let (authority, client) = (read(&admin.authority), read(&admin.client));
        keep(300);
        assert_eq!((read(&admin.authority), read(&admin.client)), (authority.clone(), client.clone()));
        keep(350);
        assert!(read(&admin.authority) == authority && read(&admin.client) != client, "near its end");
        fs::remove_file(&admin.authority.key).expect("removed");
        let client = read(&admin.client);
        keep(351);
        assert!(read(&admin.authority) != authority && read(&admin.client) != client, "a new authority");
        fs::write(&admin.client.certificate, "garbage").expect("written");
        keep(351);
        assert!(read(&admin.client).contains("BEGIN CERTIFICATE"));

        let other = Authority::create("x", Validity::days(at(351), CA_DAYS)).expect("an authority");
        fs::write(&admin.authority.key, &other.own().key).expect("written");
        fs::remove_file(&admin.client.certificate).expect("removed");
        keep(352);
        let cas = ClientCas::from_pem(read(&admin.authority).as_bytes()).expect("a bundle");
        let der = CertificateDer::from_pem_slice(read(&admin.client).as_bytes()).expect("a certificate");
        assert!(matches!(identify(&[der], &cas, at(352)), Ok(Some(_))), "the authority's key was that of another");
    }
}
