//! One image pull: resolves the reference, downloads manifests and layers from the endpoints.
//!
//! The first endpoint that resolves the reference serves the manifest; content is requested from each endpoint in turn.
//! A blob is hashed while it is written to disk, and an interrupted download resumes. Implements spec 09b §4.3.

use std::{fs::File, io::Write, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::BodyExt;
use tokio::sync::{Semaphore, mpsc};

use super::{
    auth::RegistryCredentials,
    hosts,
    http::{EndpointClient, EndpointFailure, body_bytes, refusal_text},
};
use crate::images::{
    content::{self, ContentStore},
    digest::{Digest, Hasher},
    error::{ImageError, ImageErrorKind},
    model::{self, DOCKER_LIST, DOCKER_MANIFEST, Descriptor, LONGEST_MANIFEST, OCI_INDEX, OCI_MANIFEST},
    names::{Name, TagOrDigest},
    progress::{ImageProgress, Stage},
};

/// Capacity of the queue of chunks between network and disk.
const PIECES: usize = 64;
/// Maximum retries of an interrupted layer download per endpoint.
const BREAKS: u32 = 5;

/// Result of resolving a reference.
#[derive(Clone)]
pub struct ResolvedManifest {
    /// Descriptor of the manifest or index.
    pub target: Descriptor,
    /// Content of the manifest or index.
    pub bytes: Bytes,
}

/// State of one pull.
pub struct Session {
    name: Name,
    places: Vec<EndpointClient>,
    content: ContentStore,
    /// Limits concurrent downloads of all pulls.
    slots: Arc<Semaphore>,
    /// Timeout without received data.
    idle_timeout: Duration,
    /// Progress of the downloads.
    pub progress: Arc<ImageProgress>,
}

impl Session {
    /// Determines the endpoints; does not connect. Blocking: reads small files.
    ///
    /// # Errors
    /// An endpoint's configuration or certificates are invalid.
    pub fn new(
        name: &Name,
        credentials: &RegistryCredentials,
        roots: &[PathBuf],
        content: ContentStore,
        slots: Arc<Semaphore>,
        patience: Duration,
    ) -> Result<Self, ImageError> {
        let mut places = Vec::new();
        for endpoint in hosts::endpoints(&name.host, roots)? {
            let identity = credentials.for_host(&endpoint.authority, &name.host);
            let place = EndpointClient::new(endpoint, identity.clone(), &name.path)?;
            let plain = place.http_fallback();
            places.push(place);
            if let Some(endpoint) = plain {
                places.push(EndpointClient::new(endpoint, identity, &name.path)?);
            }
        }
        let progress = Arc::default();
        Ok(Self { name: name.clone(), places, content, slots, idle_timeout: patience, progress })
    }

    /// Resolves the reference to a manifest or index.
    ///
    /// # Errors
    /// The texts of spec 09b §4.3.
    pub async fn resolve(&self) -> Result<ResolvedManifest, ImageError> {
        let reference = match &self.name.version {
            TagOrDigest::Tag(tag) => tag.clone(),
            TagOrDigest::Digest(digest) => digest.to_string(),
        };
        let by_digest = self.name.tag().is_none();
        let places = self.places.iter().filter(|place| by_digest || place.endpoint.resolves);
        let mut refusals = Vec::new();
        for place in places {
            match self.manifest_of(place, &reference).await {
                Ok(resolved) => return Ok(resolved),
                Err(refusal) => add_refusal(&mut refusals, place.endpoint.is_fallback(), refusal),
            }
        }
        Err(self.unresolved(&refusals))
    }

    fn unresolved(&self, refusals: &[EndpointFailure]) -> ImageError {
        let name = &self.name;
        let within = |error: ImageError| error.within(format!("failed to resolve reference \"{name}\""));
        if let Some(EndpointFailure::Denied(text)) =
            refusals.iter().find(|refusal| matches!(refusal, EndpointFailure::Denied(_)))
        {
            let denied = "pull access denied, repository does not exist or may require authorization";
            let text = if text.starts_with("failed to authorize") { text.clone() } else { format!("{denied}: {text}") };
            return within(with_others(ImageError::new(ImageErrorKind::Unknown, text), refusals));
        }
        let is_unavailable =
            !refusals.is_empty() && refusals.iter().all(|r| matches!(r, EndpointFailure::Unavailable(_)));
        let error = match refusals.last() {
            Some(EndpointFailure::Other(error)) => error.clone(),
            Some(refusal) if is_unavailable => ImageError::new(ImageErrorKind::Unavailable, refusal_text(refusal)),
            _ => ImageError::not_found(format!("{name}: not found")),
        };
        within(with_others(error, refusals))
    }

    async fn manifest_of(&self, place: &EndpointClient, reference: &str) -> Result<ResolvedManifest, EndpointFailure> {
        let path = format!("/{}/manifests/{reference}{}", self.name.path, self.origin(place));
        let answer = place.request(Method::GET, &path, accept()).await?;
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let kind = header("content-type").unwrap_or_default();
        let claimed = header("docker-content-digest");
        let bytes =
            body_bytes(answer, LONGEST_MANIFEST).await.map_err(|error| EndpointFailure::Unavailable(error.text))?;
        let digest = Digest::of(&bytes);
        let wanted = match &self.name.version {
            TagOrDigest::Digest(wanted) => Some(*wanted),
            TagOrDigest::Tag(_) => claimed.and_then(|text| text.parse().ok()),
        };
        if let Some(wanted) = wanted {
            content::check(&wanted, None, digest, bytes.len() as u64).map_err(EndpointFailure::Other)?;
        }
        let kind = kind.split(';').next().unwrap_or_default().trim().to_owned();
        Ok(ResolvedManifest { target: Descriptor::new(&kind, digest, bytes.len() as u64), bytes })
    }

    /// Downloads a manifest, index, or configuration.
    ///
    /// # Errors
    /// No endpoint serves it, it is longer than `limit`, or it does not match its digest.
    pub async fn document(&self, entry: &Descriptor, limit: u64) -> Result<Bytes, ImageError> {
        if entry.size > limit {
            return Err(ImageError::bad_content(format!("content {} is longer than {limit} bytes", entry.digest)));
        }
        let is_manifest = [OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST].contains(&entry.media_type.as_str());
        let kind = if is_manifest { "manifests" } else { "blobs" };
        let mut refusals = Vec::new();
        for place in &self.places {
            let path = format!("/{}/{kind}/{}{}", self.name.path, entry.digest, self.origin(place));
            let read = async {
                let answer = place.request(Method::GET, &path, accept()).await?;
                let bytes =
                    body_bytes(answer, limit).await.map_err(|error| EndpointFailure::Unavailable(error.text))?;
                content::check(&entry.digest, Some(entry.size), Digest::of(&bytes), bytes.len() as u64)
                    .map_err(EndpointFailure::Other)?;
                Ok(bytes)
            };
            match read.await {
                Ok(bytes) => return Ok(bytes),
                Err(refusal) => add_refusal(&mut refusals, place.endpoint.is_fallback(), refusal),
            }
        }
        Err(missing(entry, &refusals))
    }

    /// Downloads a layer, resuming a partial download.
    ///
    /// # Errors
    /// No endpoint serves it, it does not match its digest, or the download makes no progress until the timeout.
    pub async fn layer(&self, entry: &Descriptor) -> Result<(), ImageError> {
        let _slot =
            self.slots.acquire().await.map_err(|_| ImageError::new(ImageErrorKind::Cancelled, "pull was cancelled"))?;
        let mut refusals = Vec::new();
        for place in &self.places {
            let mut last = EndpointFailure::NotFound;
            for _ in 0..=BREAKS {
                if self.content.has(&entry.digest) {
                    return Ok(());
                }
                match self.part(place, entry).await {
                    Ok(()) => return Ok(()),
                    Err(refusal) => last = refusal,
                }
                if !matches!(last, EndpointFailure::Unavailable(_)) || place.http_fallback().is_some() {
                    break;
                }
            }
            add_refusal(&mut refusals, place.endpoint.is_fallback(), last);
        }
        Err(missing(entry, &refusals))
    }

    /// Resumes a download from one endpoint.
    async fn part(&self, place: &EndpointClient, entry: &Descriptor) -> Result<(), EndpointFailure> {
        let content = self.content.clone();
        let (digest, size) = (entry.digest, entry.size);
        let (file, hasher) = run(move || content.resume(&digest, size)).await?;
        let have = hasher.length();
        let mut headers = HeaderMap::new();
        if have > 0 && have < size {
            let range = HeaderValue::from_str(&format!("bytes={have}-"));
            headers.insert(header::RANGE, range.map_err(|error| EndpointFailure::Unavailable(error.to_string()))?);
        }
        if have == size {
            let content = self.content.clone();
            return run(move || content.finish(&file, hasher, &digest, size)).await;
        }
        let path = format!("/{}/blobs/{digest}{}", self.name.path, self.origin(place));
        let answer = place.request(Method::GET, &path, headers).await?;
        let begins_there = answer.status() == StatusCode::PARTIAL_CONTENT
            && content_range(answer.headers()).is_some_and(|from| from == have);
        let (file, hasher) = if begins_there {
            (file, hasher)
        } else {
            let content = self.content.clone();
            let mut file = file;
            let file = run(move || content.restart(&mut file).map(|()| file)).await?;
            (file, Hasher::default())
        };
        if answer.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            return Err(EndpointFailure::Unavailable("range not satisfiable".into()));
        }
        self.progress.enter(digest, Stage::Downloading, hasher.length());
        self.receive(answer.into_body(), file, hasher, entry).await
    }

    async fn receive(
        &self,
        mut body: hyper::body::Incoming,
        file: File,
        hasher: Hasher,
        entry: &Descriptor,
    ) -> Result<(), EndpointFailure> {
        let (sender, pieces) = mpsc::channel::<Bytes>(PIECES);
        let size = entry.size;
        let from_network = async move {
            loop {
                let frame = tokio::time::timeout(self.idle_timeout, body.frame()).await;
                let frame = match frame {
                    Err(_) => return Err(EndpointFailure::Other(no_progress(self.idle_timeout))),
                    Ok(None) => return Ok(()),
                    Ok(Some(Err(error))) => {
                        return Err(EndpointFailure::Unavailable(format!("download interrupted: {error}")));
                    }
                    Ok(Some(Ok(frame))) => frame,
                };
                if let Ok(piece) = frame.into_data() {
                    self.progress.add(entry.digest, piece.len() as u64);
                    if sender.send(piece).await.is_err() {
                        // The writer has failed; its error is reported below.
                        return Ok(());
                    }
                }
            }
        };
        let to_disk = run(move || write_all(file, hasher, pieces, size));
        let (received, written) = futures::join!(from_network, to_disk);
        let (file, hasher) = written?;
        received?;
        if hasher.length() < size {
            return Err(EndpointFailure::Unavailable("download interrupted".into()));
        }
        let (content, digest) = (self.content.clone(), entry.digest);
        run(move || content.finish(&file, hasher, &digest, size)).await
    }

    /// Query parameter by which a mirror learns the original registry; empty for the registry itself.
    fn origin(&self, place: &EndpointClient) -> String {
        let own = if self.name.host == "docker.io" { "registry-1.docker.io" } else { &self.name.host };
        if place.endpoint.authority == own { String::new() } else { format!("?ns={}", self.name.host) }
    }
}

fn write_all(
    mut file: File,
    mut hasher: Hasher,
    mut pieces: mpsc::Receiver<Bytes>,
    size: u64,
) -> Result<(File, Hasher), ImageError> {
    while let Some(piece) = pieces.blocking_recv() {
        if hasher.length().saturating_add(piece.len() as u64) > size {
            return Err(ImageError::new(
                ImageErrorKind::DataLoss,
                format!("more than the expected {size} bytes: size mismatch"),
            ));
        }
        hasher.update(&piece);
        file.write_all(&piece).map_err(|error| ImageError::io("write blob", &error))?;
    }
    Ok((file, hasher))
}

async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> Result<T, EndpointFailure> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.map_err(|error| EndpointFailure::Unavailable(error.to_string()))?.map_err(EndpointFailure::Other)
}

fn no_progress(patience: Duration) -> ImageError {
    let (minutes, seconds) = (patience.as_secs() / 60, patience.as_secs() % 60);
    ImageError::new(ImageErrorKind::DeadlineExceeded, format!("no progress in {minutes}m{seconds}s"))
}

fn missing(entry: &Descriptor, refusals: &[EndpointFailure]) -> ImageError {
    let error = match refusals.last() {
        Some(EndpointFailure::Other(error)) => error.clone(),
        Some(EndpointFailure::Unavailable(text)) => ImageError::new(ImageErrorKind::Unavailable, text.clone()),
        Some(EndpointFailure::Denied(text)) => ImageError::new(ImageErrorKind::Unknown, text.clone()),
        Some(EndpointFailure::NotFound) | None => ImageError::not_found(format!("content {}: not found", entry.digest)),
    };
    with_others(error, refusals)
}

/// Appends the other refusals to an error, each text once.
fn with_others(error: ImageError, refusals: &[EndpointFailure]) -> ImageError {
    let mut text = error.text;
    for refusal in refusals.iter().filter(|refusal| !matches!(refusal, EndpointFailure::NotFound)) {
        let other = refusal_text(refusal);
        if !text.contains(&other) {
            text.push_str("; ");
            text.push_str(&other);
        }
    }
    ImageError { kind: error.kind, text }
}

/// Adds a refusal. Replaces the TLS failure if the plain HTTP fallback reached the registry.
fn add_refusal(refusals: &mut Vec<EndpointFailure>, is_fallback: bool, refusal: EndpointFailure) {
    if is_fallback && !matches!(refusal, EndpointFailure::Unavailable(_)) {
        refusals.pop();
    }
    refusals.push(refusal);
}

/// Offset of a partial response.
fn content_range(headers: &HeaderMap) -> Option<u64> {
    let value = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    value.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

fn accept() -> HeaderMap {
    let mut headers = HeaderMap::new();
    let all = [DOCKER_MANIFEST, DOCKER_LIST, model::OCI_MANIFEST, OCI_INDEX, "*/*"].join(", ");
    if let Ok(value) = HeaderValue::from_str(&all) {
        headers.insert(header::ACCEPT, value);
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_lists_the_failures_of_all_endpoints() {
        let down = |text: &str| EndpointFailure::Unavailable(text.to_owned());
        let error_text = |refusals: Vec<(bool, EndpointFailure)>| {
            let mut all = Vec::new();
            for (is_fallback, refusal) in refusals {
                add_refusal(&mut all, is_fallback, refusal);
            }
            with_others(ImageError::not_found("r/a:1: not found"), &all).text
        };
        for (refusals, expected) in [
            (vec![(false, EndpointFailure::NotFound)], "r/a:1: not found"),
            (
                vec![(false, down("bad certificate")), (false, down("no such host"))],
                "r/a:1: not found; bad certificate; no such host",
            ),
            (
                vec![(false, down("bad certificate")), (false, down("bad certificate"))],
                "r/a:1: not found; bad certificate",
            ),
            // The plain HTTP fallback reached a registry without TLS.
            (vec![(false, down("no TLS")), (true, EndpointFailure::NotFound)], "r/a:1: not found"),
            (vec![(false, down("no TLS")), (true, down("refused"))], "r/a:1: not found; no TLS; refused"),
        ] {
            assert_eq!(error_text(refusals), expected);
        }
    }
}
