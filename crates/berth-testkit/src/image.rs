//! Builder of OCI image archives from `busybox-static`; needs no registry.

use std::{fs, io, path::Path};

use sha2::{Digest, Sha256};

/// Name of the image that all real-runtime tests can use.
pub const BUSYBOX: &str = "docker.io/library/busybox:1";
/// Name of the sandbox image: busybox that sleeps.
pub const PAUSE: &str = "docker.io/library/pause:berth";

/// Content and configuration of an image.
#[derive(Debug, Clone)]
pub struct Image<'a> {
    /// Full name with tag.
    pub name: &'a str,
    /// `Entrypoint` of the configuration.
    pub entrypoint: &'a [&'a str],
    /// `Cmd` of the configuration: default arguments.
    pub command: &'a [&'a str],
    /// `User` of the configuration; empty for none.
    pub user: &'a str,
    /// `Volumes` of the configuration.
    pub volumes: &'a [&'a str],
    /// Additional files: path, content, mode.
    pub files: &'a [(&'a str, Vec<u8>, u32)],
}

impl<'a> Image<'a> {
    /// Image with busybox and its applets under `/bin`.
    pub fn busybox(name: &'a str) -> Self {
        Self { name, entrypoint: &[], command: &["sh"], user: "", volumes: &[], files: &[] }
    }

    /// Sandbox image that sleeps forever.
    pub fn pause() -> Self {
        Image { entrypoint: &["/bin/sleep", "2147483647"], command: &[], ..Image::busybox(PAUSE) }
    }
}

/// Applets that get a symlink; enough for shells in tests and demos.
const APPLETS: &[&str] = &[
    "sh", "ash", "cat", "echo", "sleep", "true", "false", "ls", "mkdir", "rm", "cp", "mv", "ln", "touch", "date",
    "env", "id", "head", "tail", "grep", "sed", "seq", "wc", "kill", "ps", "hostname", "httpd", "wget", "nc", "stat",
    "test", "printf", "trap", "dd", "yes", "sync", "sort", "tr", "uname", "whoami", "df", "mount", "readlink", "ip",
    "ping", "tar", "stty", "tty", "md5sum",
];

/// Writes the archive that `ctr images import` takes.
///
/// # Errors
/// Busybox is not installed, or the target cannot be written.
pub fn write_archive(images: &[Image<'_>], target: &Path) -> io::Result<()> {
    let busybox = fs::read("/bin/busybox").or_else(|_| fs::read("/usr/bin/busybox"))?;
    let mut blobs: Vec<Vec<u8>> = Vec::new();
    let mut manifests = Vec::new();
    for image in images {
        let layer = layer(&busybox, image)?;
        let volumes = image.volumes.iter().map(|path| ((*path).to_owned(), serde_json::json!({})));
        let volumes: serde_json::Map<_, _> = volumes.collect();
        let config = serde_json::to_vec(&serde_json::json!({
            "architecture": architecture(), "os": "linux",
            "config": {
                "Entrypoint": image.entrypoint, "Cmd": image.command, "User": image.user,
                "Env": ["PATH=/bin:/sbin:/usr/bin:/usr/sbin"], "Volumes": volumes,
            },
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        }))?;
        let manifest = serde_json::to_vec(&serde_json::json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["annotations"] = serde_json::json!({
            "io.containerd.image.name": image.name,
            "org.opencontainers.image.ref.name": image.name.rsplit(':').next().unwrap_or("latest"),
        });
        manifests.push(entry);
        blobs.extend([layer, config, manifest]);
    }
    let index = serde_json::to_vec(&serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests,
    }))?;
    let mut archive = tar::Builder::new(fs::File::create(target)?);
    file(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
    file(&mut archive, "index.json", &index, 0o644)?;
    let mut seen = std::collections::BTreeSet::new();
    for blob in &blobs {
        let name = format!("blobs/{}", digest(blob).replace(':', "/"));
        if seen.insert(name.clone()) {
            file(&mut archive, &name, blob, 0o644)?;
        }
    }
    archive.into_inner()?.sync_all()
}

fn layer(busybox: &[u8], image: &Image<'_>) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for folder in ["bin/", "tmp/", "etc/", "dev/", "proc/", "sys/", "var/", "www/"] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(if folder == "tmp/" { 0o1777 } else { 0o755 });
        header.set_size(0);
        archive.append_data(&mut header, folder, io::empty())?;
    }
    file(&mut archive, "bin/busybox", busybox, 0o755)?;
    for applet in APPLETS {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_mode(0o777);
        header.set_size(0);
        archive.append_link(&mut header, format!("bin/{applet}"), "busybox")?;
    }
    file(&mut archive, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\napp:x:1000:1000:app:/:/bin/sh\n", 0o644)?;
    file(&mut archive, "etc/group", b"root:x:0:\napp:x:1000:\n", 0o644)?;
    for (path, content, mode) in image.files {
        file(&mut archive, path.trim_start_matches('/'), content, *mode)?;
    }
    archive.into_inner()
}

/// Appends a regular file to an archive.
///
/// # Errors
/// The archive cannot be written.
pub fn file<W: io::Write>(archive: &mut tar::Builder<W>, name: &str, content: &[u8], mode: u32) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    archive.append_data(&mut header, name, content)
}

/// Digest as registries name content: `sha256:<hex>`.
pub fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// OCI descriptor of a blob: media type, digest, and size.
pub fn descriptor(kind: &str, bytes: &[u8]) -> serde_json::Value {
    serde_json::json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()})
}

/// Architecture of this machine in OCI terms: `amd64`, `arm64`.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
