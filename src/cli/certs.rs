//! `berth certs`: development certificate authority and certificates for a standalone node.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use jiff::Timestamp;

use crate::certificates::{Authority, CertificatePairPaths, Validity};

/// Validity in days: of the authority, and of the certificates it signs.
const CA_DAYS: i64 = 3650;
const DAYS: i64 = 365;

#[derive(Subcommand, Debug)]
pub(super) enum CertsSubcommand {
    /// Create a certificate authority, a serving certificate, and an administrator's client certificate
    Init(Init),
}

#[derive(Args, Debug)]
pub(super) struct Init {
    /// Directory to write the certificates and keys to
    dir: PathBuf,
    /// Host name or IP address of the node; can be repeated [default: hostname of this machine]
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    /// User name of the administrator
    #[arg(long, default_value = "admin")]
    user: String,
    /// Overwrite existing files
    #[arg(long)]
    force: bool,
}

pub(super) fn run(command: &CertsSubcommand) -> ExitCode {
    let CertsSubcommand::Init(wanted) = command;
    match init(wanted, Timestamp::now()) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes all files; returns the instructions for their use.
fn init(wanted: &Init, now: Timestamp) -> Result<String> {
    // The printed paths go into a configuration file in another directory.
    let dir = std::path::absolute(&wanted.dir).with_context(|| wanted.dir.display().to_string())?;
    let files = ["ca", "server", "admin"].map(|name| CertificatePairPaths::of(&dir, name));
    let present = files.iter().flat_map(|pair| [&pair.certificate, &pair.key]).find(|path| path.exists());
    if let Some(path) = present.filter(|_| !wanted.force) {
        bail!("{} already exists; use --force to overwrite it", path.display());
    }
    let hosts = if wanted.hosts.is_empty() { vec![machine_name()?] } else { wanted.hosts.clone() };
    let first = hosts.first().cloned().unwrap_or_default();
    let names = with_local(hosts);
    let authority = Authority::create("berth development CA", Validity::days(now, CA_DAYS))?;
    let server = authority.serving(&first, &names, Validity::days(now, DAYS))?;
    let admin = authority.client(&wanted.user, &["system:masters"], Validity::days(now, DAYS))?;
    for (pair, issued) in files.iter().zip([authority.own(), &server, &admin]) {
        pair.write(issued)?;
    }
    // This machine's own name may not resolve.
    let reach = wanted.hosts.first().map_or("127.0.0.1", String::as_str);
    Ok(instructions(&dir, &names, reach))
}

fn machine_name() -> Result<String> {
    let name = nix::unistd::gethostname().context("cannot get the hostname of this machine; use --host")?;
    let name = name.to_string_lossy().trim().to_lowercase();
    if name.is_empty() {
        bail!("the hostname of this machine is empty; use --host");
    }
    Ok(name)
}

/// Adds local names: the node is also called from itself.
fn with_local(mut hosts: Vec<String>) -> Vec<String> {
    for local in ["localhost", "127.0.0.1", "::1"] {
        if !hosts.iter().any(|host| host == local) {
            hosts.push(local.to_owned());
        }
    }
    hosts
}

fn instructions(dir: &Path, names: &[String], reach: &str) -> String {
    let dir = dir.display();
    let reach = match reach.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) => format!("[{address}]"),
        _ => reach.to_owned(),
    };
    format!(
        "Certificates written to {dir} for {}:\n\n\
         \x20 ca.crt, ca.key          certificate authority; keep its key secret and off the node\n\
         \x20 server.crt, server.key  tlsCertFile and tlsPrivateKeyFile\n\
         \x20 admin.crt, admin.key    client certificate of group system:masters\n\n\
         Add to the node's configuration file:\n\n\
         \x20 tlsCertFile: {dir}/server.crt\n\
         \x20 tlsPrivateKeyFile: {dir}/server.key\n\
         \x20 authentication:\n\
         \x20   x509: {{clientCAFile: {dir}/ca.crt}}\n\n\
         Then list the pods of the node with:\n\n\
         \x20 curl --cacert {dir}/ca.crt --cert {dir}/admin.crt --key {dir}/admin.key https://{reach}:10250/pods\n",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn everything_is_written_once_and_keys_are_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("certs");
        let mut wanted =
            Init { dir: dir.clone(), hosts: vec!["node-1".to_owned()], user: "kate".to_owned(), force: false };
        let now = Timestamp::now();
        let text = init(&wanted, now).expect("made");
        assert!(text.contains("for node-1, localhost, 127.0.0.1, ::1:") && text.contains("https://node-1:10250/pods"));
        for (name, mode) in [("ca", 0o600), ("server", 0o600), ("admin", 0o600)] {
            let key = fs::metadata(dir.join(format!("{name}.key"))).expect("a key");
            assert_eq!(key.permissions().mode() & 0o777, mode, "{name}");
            assert!(fs::read_to_string(dir.join(format!("{name}.crt"))).expect("text").contains("BEGIN CERTIFICATE"));
        }
        let before = fs::read(dir.join("ca.crt")).expect("readable");
        let error = init(&wanted, now).expect_err("they are there");
        assert_eq!(
            error.to_string(),
            format!("{} already exists; use --force to overwrite it", dir.join("ca.crt").display())
        );
        assert_eq!(fs::read(dir.join("ca.crt")).expect("readable"), before);
        wanted.force = true;
        init(&wanted, now).expect("made again");
        assert_ne!(fs::read(dir.join("ca.crt")).expect("readable"), before);
        wanted.hosts = vec!["ümlaut".to_owned()];
        assert!(
            init(&wanted, now).expect_err("no name").to_string().starts_with("cannot create a certificate for ümlaut")
        );
    }
}
