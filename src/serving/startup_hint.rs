//! Startup hint of a standalone node: a curl command that works with the certificate being served.

use std::{net::IpAddr, path::Path};

use jiff::Timestamp;

use crate::certificates::{Admin, CertificateInfo, CertificatePairPaths};
use berth_config::sloppy_ip;

/// Address of the main port, and the current time.
pub struct HintInput<'a> {
    /// Listen address.
    pub address: &'a str,
    /// Listen port.
    pub port: i32,
    /// Current time, for the validity of the certificate.
    pub now: Timestamp,
}

/// Returns a curl command with which the local user can list the pods.
///
/// A certificate that is not valid for the address is used with `--resolve` and a name it is valid for. One that no
/// client would accept (expired or without a name) is pinned by its public key.
pub fn startup_hint(call: &HintInput<'_>, serving: &CertificatePairPaths, admin: &Admin) -> String {
    let port = call.port;
    let address = sloppy_ip(call.address).filter(|address| !address.is_unspecified());
    let address = address.unwrap_or(IpAddr::from([127, 0, 0, 1]));
    let shown = if address.is_ipv6() { format!("[{address}]") } else { address.to_string() };
    let believes = format!("--cacert {}", quoted(&serving.certificate));
    let seen = serving.read().0.as_deref().and_then(CertificateInfo::read);
    let (believes, host) = match &seen {
        Some(seen) if seen.is_accepted(call.now) && seen.is_for(&address.to_string()) => (believes, shown),
        Some(seen) if seen.is_accepted(call.now) && seen.any_name().is_some() => {
            let name = seen.any_name().unwrap_or_default();
            (format!("{believes} --resolve {name}:{port}:{shown}"), name.to_owned())
        }
        Some(seen) => (format!("--insecure --pinnedpubkey sha256//{}", seen.pin()), shown),
        None => (believes, shown),
    };
    let (certificate, key) = (quoted(&admin.client.certificate), quoted(&admin.client.key));
    format!("curl {believes} --cert {certificate} --key {key} https://{host}:{port}/pods")
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,@%".contains(c);
    if path.chars().all(is_plain) { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificates::{Authority, Validity, ensure_admin};

    fn at(days: i64) -> Timestamp {
        Timestamp::from_second(1_767_225_600 + days * 86_400).expect("a time")
    }

    #[test]
    fn the_command_fits_the_certificate() {
        let folder = tempfile::tempdir().expect("a folder");
        let directory = folder.path().join("a b");
        let admin = ensure_admin(&directory, "root", at(0)).expect("made");
        let serving = CertificatePairPaths::of(folder.path(), "kubelet");
        let authority = Authority::create("corporate", Validity::days(at(0), 30)).expect("an authority");
        for (names, day, address, expected) in [
            (&["127.0.0.1"][..], 1, "0.0.0.0", "--cacert DIR/kubelet.crt CLIENT https://127.0.0.1:7/pods"),
            (&["::1"], 1, "::1", "--cacert DIR/kubelet.crt CLIENT https://[::1]:7/pods"),
            (
                &["n.example"],
                1,
                "",
                "--cacert DIR/kubelet.crt --resolve n.example:7:127.0.0.1 CLIENT https://n.example:7/pods",
            ),
            (&["10.0.0.7"], 1, "10.0.0.8", "--insecure --pinnedpubkey sha256//PIN CLIENT https://10.0.0.8:7/pods"),
            (&[], 1, "0.0.0.0", "--insecure --pinnedpubkey sha256//PIN CLIENT https://127.0.0.1:7/pods"),
            (&["127.0.0.1"], 31, "0.0.0.0", "--insecure --pinnedpubkey sha256//PIN CLIENT https://127.0.0.1:7/pods"),
        ] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let issued = authority.serving("x", &names, Validity::days(at(0), 30)).expect("issued");
            serving.write(&issued).expect("written");
            let seen = CertificateInfo::read(&issued.certificate).expect("a certificate");
            let hint = startup_hint(&HintInput { address, port: 7, now: at(day) }, &serving, &admin);
            let client = format!("--cert '{0}/berth-admin.crt' --key '{0}/berth-admin.key'", directory.display());
            let expected = expected.replace("DIR", &folder.path().display().to_string());
            let expected = expected.replace("PIN", seen.pin()).replace("CLIENT", &client);
            assert_eq!(hint, format!("curl {expected}"), "{names:?}");
        }
        assert_eq!(quoted(Path::new("/it's")), r"'/it'\''s'");
        // A client certificate is not accepted as a server's.
        let client = authority.client("x", &[], Validity::days(at(0), 30)).expect("issued");
        assert!(!CertificateInfo::read(&client.certificate).expect("a certificate").is_accepted(at(1)));
    }
}
