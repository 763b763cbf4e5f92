//! A container registry on the loopback of the tests' machine, with two images that share a layer.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    thread,
};

use serde_json::{Value, json};

use berth_testkit::image;

/// Served content by path: media type and bytes.
type Content = BTreeMap<String, (&'static str, Vec<u8>)>;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// A running registry.
pub struct Registry {
    /// References of the images: busybox and files, in two layers.
    pub images: [String; 2],
}

impl Registry {
    /// Serves until the test process exits; `place` is a scratch directory.
    pub fn start(place: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let host = listener.local_addr().expect("an address").to_string();
        let content = Arc::new(content(place));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let content = Arc::clone(&content);
                // A malformed request gets no response.
                thread::spawn(move || answer(stream, &content));
            }
        });
        Self { images: ["a", "b"].map(|name| format!("{host}/{name}:1")) }
    }
}

fn answer(mut stream: TcpStream, content: &Content) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let first = lines.next()?.ok()?;
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let mut words = first.split(' ');
    let (method, path) = (words.next()?, words.next()?.split('?').next()?);
    let range =
        headers.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
    let from: usize = range.and_then(|range| range.trim().strip_suffix('-')?.parse().ok()).unwrap_or(0);
    let Some((kind, bytes)) = content.get(path) else {
        return write!(stream, "HTTP/1.1 404 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok();
    };
    let (rest, status) = (bytes.get(from..)?, if from > 0 { 206 } else { 200 });
    let place = format!("Content-Range: bytes {from}-{}/{}\r\n", bytes.len().saturating_sub(1), bytes.len());
    let head = format!("Content-Type: {kind}\r\nContent-Length: {}\r\n{place}Connection: close\r\n\r\n", rest.len());
    write!(stream, "HTTP/1.1 {status} x\r\n{head}").ok()?;
    if method == "HEAD" { Some(()) } else { stream.write_all(rest).ok() }
}

fn content(place: &Path) -> Content {
    let mut all = Content::new();
    let mut shared = None;
    for name in ["a", "b"] {
        let own = layer(name);
        // The first layer is the busybox image of all tests.
        let archive = place.join("registry.tar");
        image::write_archive(&[image::Image::busybox(image::BUSYBOX)], &archive).expect("written");
        let base = shared.get_or_insert_with(|| blobs(&archive));
        let layers = [&base.0, &own];
        let diff_ids: Vec<String> = layers.iter().map(|bytes| image::digest(bytes)).collect();
        let mut config = base.1.clone();
        config["rootfs"]["diff_ids"] = json!(diff_ids);
        let config = serde_json::to_vec(&config).expect("text");
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": described(CONFIG, &config),
            "layers": layers.map(|bytes| described(LAYER, bytes)),
        });
        let manifest = serde_json::to_vec(&manifest).expect("text");
        for reference in ["1".to_owned(), image::digest(&manifest)] {
            all.insert(format!("/v2/{name}/manifests/{reference}"), (MANIFEST, manifest.clone()));
        }
        for blob in layers.into_iter().chain([&config]) {
            all.insert(format!("/v2/{name}/blobs/{}", image::digest(blob)), ("application/octet-stream", blob.clone()));
        }
    }
    all
}

/// Layer and configuration of an archive with one image.
fn blobs(archive: &Path) -> (Vec<u8>, Value) {
    let mut files = BTreeMap::new();
    let mut archive = tar::Archive::new(fs::File::open(archive).expect("an archive"));
    for entry in archive.entries().expect("entries") {
        let mut entry = entry.expect("an entry");
        let name = entry.path().expect("a path").display().to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("bytes");
        files.insert(name, bytes);
    }
    let blob = |of: &Value| {
        let digest = of["digest"].as_str().expect("a digest");
        files[&format!("blobs/{}", digest.replace(':', "/"))].clone()
    };
    let index: Value = serde_json::from_slice(&files["index.json"]).expect("an index");
    let manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0])).expect("a manifest");
    let config = serde_json::from_slice(&blob(&manifest["config"])).expect("a configuration");
    (blob(&manifest["layers"][0]), config)
}

/// Number and length of each file of a layer.
fn lengths() -> impl Iterator<Item = (usize, usize)> {
    (0..150).map(|number| (number, if number % 30 == 0 { 400_000 } else { number * 37 }))
}

/// Expected bytes and links of a layer, as `wc` prints them.
pub fn expected_counts() -> String {
    format!("{}\n{}\n", lengths().map(|(_, length)| length).sum::<usize>(), lengths().count())
}

/// Small and large files, directories, and links, each with different content.
fn layer(name: &str) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (number, length) in lengths() {
        let content: Vec<u8> = (0..length).map(|at| (at * 31 + at / 251 + number * 7 + name.len()) as u8).collect();
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(length as u64);
        let path = format!("data-{name}/{}/f{number}", number % 7);
        archive.append_data(&mut header, &path, &content[..]).expect("appended");
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_mode(0o777);
        header.set_size(0);
        archive.append_link(&mut header, format!("data-{name}/l{number}"), &path).expect("appended");
    }
    archive.into_inner().expect("whole")
}

fn described(kind: &str, bytes: &[u8]) -> Value {
    json!({"mediaType": kind, "digest": image::digest(bytes), "size": bytes.len()})
}
