//! Commands of `berth images`, their responses, and their execution.
//!
//! The same code serves the daemon's control socket and a program that opens the store itself.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{
    builtin,
    error::{ImageError, ImageErrorKind, IoContext},
    image_details,
    names::Name,
    platform::PlatformSelection,
    progress::{ImageProgress, LayerProgress},
    record::{ImageOrigin, ImageRecord, Platform},
    registry::RegistryCredentials,
    store::{
        ImageStore, ImportOptions,
        export::TimedPipeWriter,
        verification::{RepairMode, VerificationReport},
    },
};

/// Interval of progress responses.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum size of a chunk of image details, bytes: fits into a message even if every byte is escaped.
const LONGEST_PIECE: usize = 16 << 10;

/// Subcommand of `berth images` with its arguments, as the control socket receives it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ImageCommand {
    /// List images; with a name only that one.
    List {
        /// Name or ID; empty: all.
        name: String,
    },
    /// Pull an image.
    Pull {
        /// Image reference.
        name: String,
        /// Username for the registry; empty: anonymous.
        user: String,
        /// Password for the registry; unused if `user` is empty.
        password: String,
        /// Platform to pull; none: this machine's.
        #[serde(default)]
        platform: Option<Platform>,
    },
    /// Import the images of an archive, whose descriptor is passed along.
    Import {
        /// Name of the image; none: the archive's names.
        name: Option<String>,
        /// Platforms to import.
        #[serde(default)]
        platforms: PlatformSelection,
    },
    /// Show the details of an image.
    Inspect {
        /// Name or ID.
        name: String,
    },
    /// Write images to the file whose descriptor is passed along.
    Export {
        /// Names or IDs.
        names: Vec<String>,
    },
    /// Remove an image with all its names.
    Remove {
        /// Name or ID.
        name: String,
    },
    /// Verify all images and layers.
    Verify {
        /// Whether broken content is pulled again.
        repair: bool,
    },
}

/// A response: any number of intermediate ones, then [`CommandResponse::Done`] or [`CommandResponse::Failed`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CommandResponse {
    /// Progress by layer.
    Progress(Vec<LayerProgress>),
    /// An image that was listed, pulled, imported, or removed.
    Image(Box<Image>),
    /// Next chunk of an image's details; the concatenated chunks are JSON.
    Piece(String),
    /// A verification failure.
    Broken {
        /// First tag or digest reference of the broken image, or its ID.
        image: String,
        /// The broken part and the reason.
        cause: String,
        /// Result of the repair, if one was attempted; the text is the reason of its failure.
        #[serde(rename = "mended")]
        repair: Option<Result<(), String>>,
    },
    /// Numbers of images and layers verified.
    Verified(usize, usize),
    /// The command succeeded.
    Done,
    /// The command failed: whether no such image exists, and the error text.
    Failed(bool, String),
}

/// An image as printed for users.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    /// Image ID.
    pub id: String,
    /// References by tag.
    pub repo_tags: Vec<String>,
    /// References by digest.
    pub repo_digests: Vec<String>,
    /// Compressed size, bytes.
    pub size: u64,
    /// Whether the image is exempt from garbage collection.
    pub pinned: bool,
    /// Where the image came from.
    pub source: ImageOrigin,
    /// Platform of the image.
    pub platform: Platform,
    /// When it was added to the store, RFC 3339.
    pub created: String,
    /// When a container was last created from it, RFC 3339.
    pub last_used: String,
}

impl From<&ImageRecord> for Image {
    fn from(record: &ImageRecord) -> Self {
        let time = |nanoseconds: i64| {
            jiff::Timestamp::from_nanosecond(nanoseconds.into()).map(|at| at.to_string()).unwrap_or_default()
        };
        Self {
            id: record.id(),
            repo_tags: record.repo_tags(),
            repo_digests: record.repo_digests(),
            size: record.size,
            pinned: record.pinned,
            source: record.source,
            platform: record.platform.clone(),
            created: time(record.created),
            last_used: time(record.last_used),
        }
    }
}

/// Channel for responses. The receiver may be gone.
pub type ResponseSender = mpsc::Sender<CommandResponse>;

/// Executes a command and sends its responses, except the last.
///
/// # Errors
/// The reason of the failure; completed parts remain.
pub async fn execute(
    store: &ImageStore,
    order: ImageCommand,
    file: Option<OwnedFd>,
    sender: &ResponseSender,
) -> Result<(), ImageError> {
    let responses = match order {
        ImageCommand::List { name } => images(&store.list(&name)?),
        ImageCommand::Pull { name, user, password, platform } => {
            let credentials = RegistryCredentials { username: user, password, ..RegistryCredentials::default() };
            images(&[pull(store, &name, &credentials, platform, sender).await?])
        }
        ImageCommand::Inspect { name } => pieces(&image_details::of(store, &name).await?.to_string()),
        ImageCommand::Import { name, platforms } => {
            let file = file.ok_or_else(|| ImageError::invalid("archive descriptor is missing"))?;
            let progress: Arc<ImageProgress> = Arc::default();
            let choice = ImportOptions { name: name.as_deref().map(Name::parse).transpose()?, platforms };
            let work = store.import_watched(file, choice, Arc::clone(&progress));
            images(&watched(work, &progress, sender).await?)
        }
        ImageCommand::Export { names } => {
            let file = file.ok_or_else(|| ImageError::invalid("file descriptor is missing"))?;
            let progress: Arc<ImageProgress> = Arc::default();
            let into = TimedPipeWriter { inner: File::from(file) };
            let file = watched(store.export(names, into, Arc::clone(&progress)), &progress, sender).await?;
            sync(file.inner)?;
            Vec::new()
        }
        ImageCommand::Remove { name } => {
            let missing = || ImageError::not_found(format!("image {name:?}: not found"));
            let record = store.status(&name)?.ok_or_else(missing)?;
            store.remove(&record.id()).await?;
            images(&[record])
        }
        ImageCommand::Verify { repair } => {
            let progress: Arc<ImageProgress> = Arc::default();
            let mode = if repair { RepairMode::Yes } else { RepairMode::No };
            let VerificationReport { images, layers, findings } =
                watched(store.verify(mode, Arc::clone(&progress)), &progress, sender).await?;
            let broken = findings.into_iter().map(|finding| CommandResponse::Broken {
                image: finding.image,
                cause: finding.cause,
                repair: finding.repair,
            });
            broken.chain([CommandResponse::Verified(images, layers)]).collect()
        }
    };
    for response in responses {
        // The client may have disconnected.
        let _ = sender.send(response).await;
    }
    Ok(())
}

fn images(records: &[Arc<ImageRecord>]) -> Vec<CommandResponse> {
    records.iter().map(|record| CommandResponse::Image(Box::new(Image::from(&**record)))).collect()
}

/// Splits the text into chunks that fit into a message.
fn pieces(text: &str) -> Vec<CommandResponse> {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        // A character takes at most four bytes.
        let most = rest.len().min(LONGEST_PIECE);
        let end = (most.saturating_sub(3)..=most).rev().find(|end| rest.is_char_boundary(*end)).unwrap_or(rest.len());
        let (piece, more) = rest.split_at(end);
        out.push(CommandResponse::Piece(piece.to_owned()));
        rest = more;
    }
    out
}

async fn pull(
    store: &ImageStore,
    name: &str,
    credentials: &RegistryCredentials,
    platform: Option<Platform>,
    sender: &ResponseSender,
) -> Result<Arc<ImageRecord>, ImageError> {
    if builtin::HOSTS.contains(&Name::parse(name)?.host.as_str()) {
        return store.pull(name, credentials).await;
    }
    let (pull, progress) = store.pull_watched(name, credentials, platform)?;
    watched(pull, &progress, sender).await
}

/// Sends progress responses until the work completes.
async fn watched<T>(
    work: impl Future<Output = Result<T, ImageError>>,
    progress: &ImageProgress,
    sender: &ResponseSender,
) -> Result<T, ImageError> {
    let mut work = std::pin::pin!(work);
    let mut last = Vec::new();
    loop {
        let done = tokio::time::timeout(PROGRESS_INTERVAL, &mut work).await;
        let shown = progress.snapshot();
        if shown != last {
            last.clone_from(&shown);
            // A slow client misses intermediate progress; the result is not sent here.
            let _ = sender.try_send(CommandResponse::Progress(shown));
        }
        if let Ok(result) = done {
            return result;
        }
    }
}

/// Syncs a regular file before success is reported; pipes cannot be synced.
fn sync(file: File) -> Result<(), ImageError> {
    let stat = rustix::fs::fstat(file.as_fd()).attempt("stat archive")?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        file.sync_data().attempt("sync archive")?;
    }
    Ok(())
}

/// The last response of a command.
pub fn final_response(outcome: Result<(), ImageError>) -> CommandResponse {
    match outcome {
        Ok(()) => CommandResponse::Done,
        Err(error) => CommandResponse::Failed(error.kind == ImageErrorKind::NotFound, error.text),
    }
}
