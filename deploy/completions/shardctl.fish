# Completion of shardctl in fish. What a word may become is what `shardctl --complete` prints.

function __shardctl_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] --complete $words[2..-1] "$current" 2>/dev/null)
        switch $line
            case :file
                __fish_complete_path "$current"
            case :dir
                __fish_complete_directories "$current" ''
            case :command
                complete -C "$current"
            case '*'
                echo $line
        end
    end
end

complete -c shardctl -f -a '(__shardctl_complete)'
